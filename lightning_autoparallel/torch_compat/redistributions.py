"""Before DTensors move what ranks hold of them: ``redistribute``, ``full_tensor``, and operators that begin with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.tensor import _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

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
    """Copies are cut without a word to others."""
    pairs = zip(current.placements, target.placements, strict=True)
    return any(before != after and not before.is_replicate() for before, after in pairs)
