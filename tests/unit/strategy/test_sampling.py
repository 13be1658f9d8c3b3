"""Which loaders can be planned for: those that have their batches still after one was looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_autoparallel.strategy.sampling import _has_batches_left


class Stream(IterableDataset):
    """Nothing is known of it."""

    def __iter__(self) -> Any:
        return iter(range(4))


class Remembers(DataLoader):
    """Knows where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""


@pytest.mark.parametrize(
    ("source", "can_be"),
    [
        ([1, 2], True),
        (DataLoader(torch.arange(4)), True),
        (DataLoader(Stream()), True),
        (iter([1, 2]), False),
        (Remembers(torch.arange(4)), False),
    ],
    ids=["list", "by index", "stream", "iterator", "remembers"],
)
def test_only_what_can_be_read_again_is_looked_at(source: Any, can_be: bool) -> None:
    assert _has_batches_left(source) == can_be
