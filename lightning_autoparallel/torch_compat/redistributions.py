"""Before DTensors move what ranks hold of them: ``redistribute``, ``full_tensor``, and operators that begin with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

_NAME = "redistribute_local_tensor"
_CALLERS = (_api, _dispatch, _redistribute)


@contextlib.contextmanager
def redistributions_told(tell: Callable[[], None]) -> Iterator[None]:
    """``tell()`` is called before every one that has ranks send something to each other."""
    original = vars(_redistribute)[_NAME]

    def redistribute(local: Tensor, current: DTensorSpec, target: DTensorSpec, **options: Any) -> Tensor:
        if _moves(current, target):
            tell()
        moved: Tensor = original(local, current, target, **options)
        return moved

    with contextlib.ExitStack() as stack:
        for module in _CALLERS:
            stack.enter_context(mock.patch.object(module, _NAME, redistribute))
        yield


def _moves(current: DTensorSpec, target: DTensorSpec) -> bool:
    """Copies are cut without a word to others, unless what they are cut by is undone for it."""
    mesh = current.mesh
    if mesh.size() < dist.get_world_size():
        return False  # other ranks have no part in it
    pairs = zip(current.placements, target.placements, strict=True)
    changes = [(before, after) for i, (before, after) in enumerate(pairs) if before != after and mesh.size(i) > 1]
    if any(not before.is_replicate() for before, _ in changes):
        return True
    cut = _dims(current.placements)
    return not cut.isdisjoint(_dims(after for _, after in changes))


def _dims(placements: Iterable[Placement]) -> set[int]:
    """Those that any of them cuts."""
    return {placement.dim for placement in placements if hasattr(placement, "dim")}
