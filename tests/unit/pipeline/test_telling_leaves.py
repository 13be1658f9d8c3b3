"""Which values tell that ranks share them, where two ranks have the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_autoparallel.pipeline.shared_leaves import is_telling


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "leaf",
    [
        drawn(4, 2),
        drawn(8),
        drawn(4, 3).to(torch.complex64),
        drawn(5000, 40),
        (drawn(16, 9) * 1000).long(),
        drawn(32, 64).bfloat16(),
        torch.arange(3),
        torch.arange(4.0),
        torch.tensor([[10, 13], [16, 30], [33, 23], [30, 61]]),  # sizes of boxes
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]),  # which graph a node is of
        drawn(8, 2).to(torch.float8_e4m3fn),
        drawn(8, 16) > 0.5,  # codes
    ],
)
def test_numbers_that_hardly_come_twice_tell(leaf: Tensor) -> None:
    assert is_telling(leaf)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(64)[None] < torch.tensor([64, 50, 64, 20])[:, None],  # a mask of padding
        drawn(64) > 0.5,  # of two classes
        torch.tensor([2, 0, 1, 1, 0, 2, 3, 1]),  # a few labels
        torch.ones(64, 3),
        drawn(1, 100),  # one row
        torch.arange(512).expand(16, 512),  # every row alike
        torch.tensor([0.1, 0.9, 0.5, 0.1]),  # written by hand
        torch.tensor([512] * 62 + [100, 7]),  # lengths
        torch.full((4, 4), torch.nan),
        torch.tensor([37, 52, 41, 60]),
        torch.eye(4),
        torch.empty(4, 8, dtype=torch.bits8),
    ],
)
def test_what_ranks_may_have_alike_by_chance_does_not(leaf: Tensor) -> None:
    assert not is_telling(leaf)
