"""One number of a DTensor: torch gives what this rank has of it, also of a sum that ranks have yet to add up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

_READ = torch.ops.aten._local_scalar_dense.default


@contextlib.contextmanager
def numbers_read_by(read: Callable[[DTensor], torch.Tensor]) -> Iterator[None]:
    """``item()``, ``float()`` and their like take the number of what ``read`` returns, where ranks hold parts of it."""

    def number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        whole = all(placement.is_replicate() for placement in tensor.placements)
        return operator(tensor.to_local() if whole else read(tensor))

    with mock.patch.dict(DTensor._op_dispatcher._custom_op_handlers, {_READ: number}):
        yield
