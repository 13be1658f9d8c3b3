"""Which loaders may be looked at before training: those from which reading a batch takes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_autoparallel.strategy.sampling import _is_free_to_read


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
    ("source", "is_free"),
    [
        ([1, 2], True),
        (DataLoader(torch.arange(4)), True),
        (DataLoader(Stream()), False),
        (iter([1, 2]), False),
        (Remembers(torch.arange(4)), False),
    ],
    ids=["list", "by index", "stream", "iterator", "remembers"],
)
def test_only_what_can_be_read_again_is_read_ahead(source: Any, is_free: bool) -> None:
    assert _is_free_to_read(source) == is_free
