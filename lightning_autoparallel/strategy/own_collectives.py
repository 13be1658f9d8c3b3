"""Collectives that a step's own Python starts over all ranks, of which some have the same rows: somebody is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.torch_compat.default_world import launched_by_default


class OwnCollectives:
    """Looks, around each step in forward mode, whether torch's default group was used, until it has told of one.

    Nothing of ours or of Lightning's uses it in a step: the mesh has groups of its own.
    """

    def __init__(self, control: ControlGroup, warn: Callable[[str], None]) -> None:
        self._shards, self._warn = control.shards, warn
        self._is_needed = len(set(control.shards)) < len(control.shards)

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Around the Python of the step ``name``."""
        before = launched_by_default() if self._is_needed else 0
        yield
        if not self._is_needed or launched_by_default() == before:
            return
        self._is_needed = False
        ranks, copies = len(self._shards), len(self._shards) // len(set(self._shards))
        self._warn(
            f"autoparallel: {name} calls collectives of torch.distributed over all {ranks} ranks, of which {copies} at "
            f"a time have the same rows: what it sums or gathers is there {copies} times. self.all_gather takes each "
            "shard of the batch once, as does a group of the dp_* axes "
            "(trainer.strategy.device_mesh['dp_shard'].get_group())"
        )
