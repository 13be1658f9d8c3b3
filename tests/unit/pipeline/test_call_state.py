"""What tells calls of one module apart besides their arguments."""

from __future__ import annotations

import torch
from torch import nn

from lightning_autoparallel.pipeline.local_calls import call_state


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)


def test_a_buffer_that_goes_in_one_place_and_comes_in_another() -> None:
    """As many of the same name are there before and after."""
    both = nn.Sequential(Masked(), Masked())
    seen = []
    for one, other in ((torch.ones(2), None), (None, torch.ones(2)), (None, None)):
        both[0].mask, both[1].mask = one, other
        seen.append(call_state(both, True, torch.device("cpu")))
    assert len(set(seen)) == 3 and call_state(both, True, torch.device("cpu")) == seen[-1]
