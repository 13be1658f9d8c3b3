"""Tensors whose bytes ``torch.save`` asks for when it writes them: one at a time, so that they need not all be there.

``torch.save`` pickles what a tensor is made of first, and writes the bytes of storages one after another then: of a
storage that is not on the host it writes what its ``cpu()`` returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

_BYTES = torch.uint8  # of storages of those dtypes that came after typed storages


class LaterTensor:
    """Is pickled as a contiguous tensor on the host, whose values ``make`` gives when they are written."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self._shape, self._dtype = shape, dtype
        self._is_typed = dtype in torch.storage._dtype_to_storage_type_map()
        self._storage = _TypedLater(_Later(shape.numel() * dtype.itemsize, make), dtype if self._is_typed else _BYTES)

    def __deepcopy__(self, memo: dict[int, Any]) -> LaterTensor:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self._shape, device="meta").stride()
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (self._storage, 0, tuple(self._shape), strides, False, hooks)
        if self._is_typed:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, self._dtype)


class LaterParameter:
    """Is pickled as a parameter of the tensor that ``value`` is pickled as."""

    def __init__(self, value: LaterTensor, requires_grad: bool) -> None:
        self._value, self._requires_grad = value, requires_grad

    def __deepcopy__(self, memo: dict[int, Any]) -> LaterParameter:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (self._value, self._requires_grad, OrderedDict())


class _Later:
    """What ``torch.save`` asks of an untyped storage."""

    device = torch.device("meta")

    def __init__(self, size_bytes: int, make: Callable[[], Tensor]) -> None:
        self._size_bytes, self._make = size_bytes, make

    @property
    def _cdata(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        return self._size_bytes

    def cpu(self) -> UntypedStorage:
        values = self._make().detach().cpu().contiguous()
        if values.untyped_storage().nbytes() != self._size_bytes:  # a part of something larger
            values = values.clone()
        return values.untyped_storage()


class _TypedLater(TypedStorage):
    _fake_device = torch.device("cpu")  # where ``torch.load`` finds it

    def __new__(cls, *_: Any) -> _TypedLater:
        return object.__new__(cls)

    def __init__(self, storage: _Later, dtype: torch.dtype) -> None:
        self._untyped_storage = storage  # type: ignore[assignment]
        self.dtype = dtype
