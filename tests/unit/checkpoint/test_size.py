"""What is gathered behind a training is counted, whatever a checkpoint has of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_autoparallel.checkpoint import gathered_bytes, state_bytes


class Adapted(nn.Module):
    """Its checkpoints have the adapter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)
        self.register_buffer("table", torch.zeros(4, dtype=torch.float64), persistent=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "adapter" in name}


def test_what_no_checkpoint_has_is_gathered_too() -> None:
    module = Adapted()
    optimizer = torch.optim.SGD(module.adapter.parameters(), lr=0.1, momentum=0.9)
    module.adapter(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert state_bytes(module, [optimizer]) == 4 * (8 + 8)
    assert gathered_bytes(module, [optimizer]) == 4 * (64 + 8 + 8) + 8 * 4
