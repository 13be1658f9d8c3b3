"""torchmetrics joins the batch shards, each as often as it counted, wherever metrics are updated and computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lightning_autoparallel.mesh import ParallelMesh


@contextlib.contextmanager
def joined_over_rows(mesh: ParallelMesh) -> Iterator[None]:
    """Metrics without a group of their own join the batch shards only.

    torchmetrics joins all processes, of which those on other axes hold the same rows, counted again for each. Lists
    that it gathers entry by entry may be longer on one rank than on another.
    """
    real_sync, real_join = torchmetrics.Metric.sync, torchmetrics.Metric._sync_dist

    def sync(
        metric: torchmetrics.Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        own = process_group or metric.process_group or mesh.submesh(mesh.data_parallel_axes).get_group()
        real_sync(metric, dist_sync_fn, own, *args, **kwargs)

    def join(metric: torchmetrics.Metric, dist_sync_fn: Any, process_group: Any) -> None:
        _join_lists(metric, lambda: real_join(metric, dist_sync_fn, process_group), process_group)

    with (
        mock.patch.object(torchmetrics.Metric, "sync", sync),
        mock.patch.object(torchmetrics.Metric, "_sync_dist", join),
    ):
        yield


def _join_lists(metric: torchmetrics.Metric, join: Callable[[], None], group: dist.ProcessGroup) -> None:
    """``join``, for which every rank of the group has as many entries as the one that has most."""
    reductions: dict[str, Any] = dict(metric._reductions)
    one_by_one = [
        n for n, how in reductions.items() if how is not dim_zero_cat and isinstance(metric._defaults[n], list)
    ]
    if not one_by_one:
        return join()
    entries = {name: _entries(metric, name) for name in one_by_one}
    own = {name: (len(found), found[-1].dim(), found[-1].dtype) for name, found in entries.items() if found}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    counts = {name: [one[name][0] if name in one else 0 for one in everyone] for name in one_by_one}
    uneven = [name for name, count in counts.items() if len(set(count)) > 1]
    for name in uneven:
        _, dim, dtype = max((one[name] for one in everyone if name in one), key=lambda kind: kind[0])
        there = entries[name]
        filler = torch.zeros((0,) * dim, dtype=dtype, device=metric.device)
        setattr(metric, name, [*there, *[filler] * (max(counts[name]) - len(there))])
        metric._reductions[name] = None  # of what is there, below
    try:
        join()
    finally:
        metric._reductions.update(reductions)
    for name in uneven:
        joined = iter(getattr(metric, name))  # the first entries of all ranks, then the second
        places = [place < count for place in range(max(counts[name])) for count in counts[name]]
        kept = [entry for entry, is_there in zip(joined, places, strict=True) if is_there]
        reduction = reductions[name]
        setattr(metric, name, kept if reduction is None else reduction(kept))


def _entries(metric: torchmetrics.Metric, name: str) -> list[Tensor]:
    """A state's entries, none if they are no tensors: what else is in lists each metric joins by itself."""
    found = getattr(metric, name)
    is_listed = isinstance(found, list) and all(isinstance(entry, Tensor) for entry in found)
    return found if is_listed else []
