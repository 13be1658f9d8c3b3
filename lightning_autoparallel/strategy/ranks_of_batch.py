"""The ranks that a step's own Python finds where several hold the same rows: those of the batch, as under DDP.

Summed or gathered over all ranks, rows would count once for each rank that holds them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_autoparallel.lightning_compat import LightningModule, Trainer
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.torch_compat.default_world import launched_over_all
from lightning_autoparallel.torch_compat.users_world import is_users, joins_told, users_world


class RanksOfBatch:
    """Gives user code, in steps that run as they are written, the batch shards for ranks, and says so once.

    Every rank makes one at the same time: their group, one rank of each shard, is made here.
    """

    def __init__(self, context: StageContext, trainer: Trainer, warn: Callable[[str], None]) -> None:
        self._context, control = context, context.control
        is_needed = bool(control.shards) and not control.alone
        self._group: dist.ProcessGroup | None = context.mesh.make_batch_group() if is_needed else None
        self._trainer, self._warn = trainer, warn
        self._ranks = len(control.shards)
        self._asked = False  # in the step, or backward, that runs
        self._told: set[tuple[str, bool]] = set()

    @property
    def group_names(self) -> tuple[str, ...]:
        """Of the group that user code finds, if it is another one than that of all ranks."""
        return () if self._group is None else (self._group.group_name,)

    @contextlib.contextmanager
    def seen(self, name: str) -> Iterator[None]:
        """Around the Python of the step ``name``, and around its backward."""
        if self._group is None:
            yield
            return
        before, outer = self._launched_over_all(), self._asked
        self._asked = False
        with users_world(self._group, self._note), contextlib.ExitStack() as patches:
            for patch in self._patches():
                patches.enter_context(patch)
            yield
        if self._launched_over_all() != before:
            self._tell(name, of_all=True)
        elif self._asked:
            self._tell(name, of_all=False)
        self._asked = self._asked or outer

    def told_in(self, hook: str) -> contextlib.AbstractContextManager[None]:
        """Around a hook, in which the ranks are processes: what it sums or gathers over them is said once."""
        return contextlib.nullcontext() if self._group is None else joins_told(partial(self._tell_of_hook, hook))

    def _tell_of_hook(self, hook: str, function: str) -> None:
        assert self._group is not None
        if (hook, True) not in self._told:
            self._told.add((hook, True))
            copies = self._ranks // self._group.size()
            self._warn(
                f"autoparallel: {hook} calls torch.distributed.{function} over all {self._ranks} ranks, of which "
                f"{copies} at a time have the same rows: what is of rows is there {copies} times. self.all_gather "
                "takes each shard of the batch once"
            )

    def _launched_over_all(self) -> int:
        control = self._context.control.group
        own = {*self._context.mesh.axes_by_group(), *([] if control is None else [control.group_name])}
        return launched_over_all(own)

    def _note(self) -> None:
        self._asked = True

    def _patches(self) -> list[Any]:
        """Of Lightning's own words for the same."""
        assert self._group is not None
        rank, size = self._group.rank(), self._group.size()
        strategy = type(self._trainer.strategy)
        asked = [(owner, "global_rank", rank) for owner in (LightningModule, Trainer, strategy)]
        asked += [(owner, "world_size", size) for owner in (Trainer, strategy)]
        return [self._patch(owner, name, value) for owner, name, value in asked]

    def _patch(self, owner: type, name: str, value: int) -> Any:
        found: property = getattr(owner, name)

        def of_batch(self_: Any) -> Any:
            if not is_users(sys._getframe(1)):
                return found.__get__(self_)
            self._note()
            return value

        return mock.patch.object(owner, name, property(of_batch))

    def _tell(self, name: str, of_all: bool) -> None:
        if (name, of_all) not in self._told:
            self._told.add((name, of_all))
            self._warn(self._on_all_ranks(name) if of_all else self._on_shards(name))

    def _on_shards(self, name: str) -> str:
        assert self._group is not None
        return (
            f"autoparallel: {name} asks for the ranks, and in steps they are the batch's {self._group.size()} shards: "
            f"torch.distributed, global_rank and world_size tell of these, as self.all_gather does, though "
            f"{self._ranks} processes train, some with the same number: files are for trainer.is_global_zero, which is "
            "one process. What was asked for outside of steps, in __init__ or a hook, counts processes: divide by no "
            "such number"
        )

    def _on_all_ranks(self, name: str) -> str:
        assert self._group is not None
        copies = self._ranks // self._group.size()
        return (
            f"autoparallel: {name} calls collectives of torch.distributed over all {self._ranks} ranks, of which "
            f"{copies} at a time have the same rows: what it sums or gathers is there {copies} times. Without a group "
            "torch.distributed takes each shard of the batch once in a step, as does self.all_gather"
        )
