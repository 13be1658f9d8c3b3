"""Functional collectives as graph targets, and the process groups behind them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _register_process_group, _resolve_process_group, _set_pg_timeout

c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
ALL_GATHER_SEVERAL = c10d.all_gather_into_tensor_coalesced.default  # one launch for a list of tensors
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
BROADCAST = c10d.broadcast.default
WAIT = c10d.wait_tensor.default


def launched_collectives(group_name: str) -> int:
    """Collectives started so far on a process group, by its own sequence counter."""
    return int(_resolve_process_group(group_name)._get_sequence_number_for_group())  # type: ignore[attr-defined, arg-type]


def group_place(group_name: str) -> tuple[int, int]:
    """This process's rank in a process group, and the group's size."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return int(group.rank()), int(group.size())


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dims of several meshes of one root, on their process groups."""
    return DeviceMesh._concatenate(meshes)


def default_timeout() -> timedelta | None:
    """The timeout of the default group's collectives; None in a fake world, which never waits."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend() == "fake":
        return None
    options = world._get_backend(max(world._device_types, key=lambda device: device.type == "cuda")).options
    return options._timeout  # type: ignore[no-any-return]


def give_default_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let collectives of these groups wait as long as the default group's; torch makes groups with its own default."""
    timeout = default_timeout()
    if timeout is not None:
        for group in groups:
            _set_pg_timeout(timeout, group)


def can_order_ranks() -> bool:
    """Whether the ranks of a group may count in another order than theirs: else torch sorts them."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def has_group(name: str) -> bool:
    """Whether collectives find a process group by this name."""
    try:
        _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return False
    return True


def group_of(name: str) -> dist.ProcessGroup:
    """The process group that collectives find by this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def new_ordered_groups(rank_lists: Sequence[Sequence[int]], name: str) -> None:
    """One group per list, its ranks counted in the order of the list; ``name`` is that which this process is in.

    All ranks call it alike, where they ``can_order_ranks``. The timeout is the default group's.
    """
    own, timeout = None, default_timeout()
    for ranks in rank_lists:
        group = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
        own = group if dist.get_rank() in ranks else own
    assert own is not None, "every rank is in one of the lists"
    _register_process_group(name, own)  # type: ignore[arg-type]


def init_fake_world(world_size: int, rank: int = 0) -> None:
    """A default process group of ``world_size`` ranks in this one process: it plans and counts, it moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
