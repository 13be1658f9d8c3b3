"""The processes' world: all groups of this one, whoever made them, and the store by which they met."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from lightning_autoparallel.torch_compat.collectives import launched_collectives

_GLOO = "/gloo/gloo/"


def backend_of(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """What moves tensors of a type of device in a group, the default one unless given: ``gloo``, ``nccl``, ``fake``.

    None where nothing does: a group may have a backend for each type, ``cpu:gloo,cuda:nccl``.
    """
    name = dist.get_backend(group)
    if name == "fake":
        return str(name)
    found = dist.BackendConfig(dist.Backend(name)).get_device_backend_map().get(device_type)
    return None if found is None else str(found)


def launched_over_all(but: Collection[str]) -> int:
    """Collectives started so far on groups of all ranks, ``but`` for those of these names."""
    ranks = dist.get_world_size()
    named = [name for group, name in _world.pg_names.items() if group.size() == ranks and name not in but]
    return sum(map(launched_collectives, named))


def all_launched_collectives() -> int:
    """Collectives started so far on any process group that this process is in, by the groups' own counters."""
    return sum(launched_collectives(name) for name in _world.pg_names.values())


def store_of_world(timeout: timedelta) -> dist.Store:
    """The store by which the ranks of the default group met, over a connection of its own; answers take ``timeout``."""
    store: Any = _get_default_store()
    own: dist.Store = store.clone()
    own.set_timeout(timeout)
    return own


def append_to(store: dist.Store, key: str, text: str) -> None:
    """Append to what the store has under ``key``, at once; torch's annotations do not know of it."""
    with_append: Any = store
    with_append.append(key, text)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that it comes from, is that of a rank that waited for others in vain.

    Gloo has no class for it: its messages begin with the file of its source that found it.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, dist.DistError) or _GLOO in str(current):
            return True
        current = current.__cause__ or current.__context__
    return False
