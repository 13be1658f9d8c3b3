"""torchmetrics joins the batch shards, each as often as it counted, wherever metrics are updated and computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_autoparallel.mesh import ParallelMesh


@contextlib.contextmanager
def joined_over_rows(mesh: ParallelMesh) -> Iterator[None]:
    """Metrics that name no group, or that of all processes, join the batch shards only.

    torchmetrics joins all processes, of which those on other axes hold the same rows, counted again for each. Lists
    that it gathers entry by entry may be longer on one rank than on another.
    """
    real_sync, real_join = torchmetrics.Metric.sync, torchmetrics.Metric._sync_dist
    shards = _group_of_shards(mesh)

    def group_of(metric: torchmetrics.Metric, given: Any) -> Any:
        named = given or metric.process_group
        return shards if named is None or named is dist.group.WORLD else named

    def sync(
        metric: torchmetrics.Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        real_sync(metric, dist_sync_fn, group_of(metric, process_group), *args, **kwargs)

    def join(metric: torchmetrics.Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        group = group_of(metric, process_group)
        _join_lists(metric, lambda: real_join(metric, dist_sync_fn, group), group)

    with (
        mock.patch.object(torchmetrics.Metric, "sync", sync),
        mock.patch.object(torchmetrics.Metric, "_sync_dist", join),
    ):
        yield


def _group_of_shards(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """One rank of each batch shard; None in a fake world, in which nobody is joined."""
    if mesh.active(mesh.data_parallel_axes):
        return mesh.submesh(mesh.data_parallel_axes).get_group()
    return None if mesh.backend == "fake" else mesh.make_batch_group()


def _join_lists(metric: torchmetrics.Metric, join: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """``join``, for which every rank of the group has as many entries as the one that has most.

    Of lists that it makes one tensor of before, each rank has one, of no rows if need be.
    """
    reductions: dict[str, Any] = dict(metric._reductions)
    entries = {name: _entries(metric, name) for name in reductions if isinstance(metric._defaults[name], list)}
    if not entries:
        return join()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: _Entries.of(found) for name, found in entries.items()}, group=group)
    uneven = []
    for name, found in entries.items():
        most = max((one[name] for one in everyone), key=lambda entries: entries.count)
        if reductions[name] is dim_zero_cat:
            if most.count:
                setattr(metric, name, [dim_zero_cat(found) if found else most.no_rows(metric)])
        elif any(one[name].count < most.count for one in everyone):
            setattr(metric, name, [*found, *[most.filler(metric)] * (most.count - len(found))])
            metric._reductions[name] = None  # of what is there, below
            uneven.append(name)
    try:
        join()
    finally:
        metric._reductions.update(reductions)
    for name in uneven:
        counts = [one[name].count for one in everyone]
        joined = iter(getattr(metric, name))  # the first entries of all ranks, then the second
        places = [place < count for place in range(max(counts)) for count in counts]
        kept = [entry for entry, is_there in zip(joined, places, strict=True) if is_there]
        reduction = reductions[name]
        setattr(metric, name, kept if reduction is None else reduction(kept))


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """How many entries a list has on a rank, and of what kind the last is."""

    count: int
    row: tuple[int, ...] = ()
    is_number: bool = False
    dtype: torch.dtype = torch.float32
    on_host: bool = False  # which metrics may ask for, whatever their device

    @classmethod
    def of(cls, found: list[Tensor]) -> _Entries:
        if not found:
            return cls(count=0)
        last = found[-1]
        return cls(
            count=len(found),
            row=tuple(last.shape[1:]),
            is_number=not last.dim(),
            dtype=last.dtype,
            on_host=last.device.type == "cpu",
        )

    def no_rows(self, metric: torchmetrics.Metric) -> Tensor:
        """What entries made one tensor are without any."""
        device = torch.device("cpu") if self.on_host else metric.device
        return torch.zeros((0, *self.row), dtype=self.dtype, device=device)

    def filler(self, metric: torchmetrics.Metric) -> Tensor:
        """An entry of as many dims, in the place of one."""
        return self.no_rows(metric).sum().to(self.dtype) if self.is_number else self.no_rows(metric)


def _entries(metric: torchmetrics.Metric, name: str) -> list[Tensor]:
    """A state's entries, none if they are no tensors: what else is in lists each metric joins by itself."""
    found = getattr(metric, name)
    if isinstance(found, Tensor):  # they were made one
        return [found]
    is_listed = isinstance(found, list) and all(isinstance(entry, Tensor) for entry in found)
    return found if is_listed else []
