"""``parameter.data = tensor`` and ``parameter.grad = tensor`` where the parameter is a DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad


Told = Callable[[DTensor, Tensor, str], object]  # a parameter, a whole tensor that is assigned, and to what of it


@contextlib.contextmanager
def assigned_in_shards(told: Told = lambda parameter, value, of: None) -> Iterator[None]:
    """While open, the first changes the shard, and a whole gradient is cut as its parameter is.

    Torch would change the shape and dtype that autograd sees, and leave the shard as it is: the assignment is lost.
    Whole gradients it takes, and fails where they meet shards.
    """
    data = property(_get(_DATA), lambda tensor, value: _set_data(tensor, value, told))
    gradient = property(_get(_GRADIENT), lambda tensor, value: _set_gradient(tensor, value, told), _delete_gradient)
    with (
        mock.patch.object(DTensor, "data", data, create=True),
        mock.patch.object(DTensor, "grad", gradient, create=True),
    ):
        yield


def _get(descriptor: Any) -> Callable[[DTensor], Any]:
    return lambda tensor: descriptor.__get__(tensor)


def _set_data(tensor: DTensor, value: Tensor, told: Told) -> None:
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RuntimeError(
            f"a parameter that lies in shards has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and .data = "
            f"tensor of shape {tuple(value.shape)} and dtype {value.dtype} would change that: do so before training"
        )
    if not isinstance(value, DTensor):
        told(tensor, value, "")
    with torch.no_grad():
        tensor.detach().copy_(_cut(value, tensor))


def _set_gradient(tensor: DTensor, value: Tensor | None, told: Told) -> None:
    is_whole = isinstance(value, Tensor) and value.shape == tensor.shape
    if is_whole and not isinstance(value, DTensor):
        told(tensor, value, "the gradient of ")  # type: ignore[arg-type]
    _GRADIENT.__set__(tensor, _cut(value, tensor) if is_whole else value)


def _delete_gradient(tensor: DTensor) -> None:
    _GRADIENT.__delete__(tensor)


def _cut(value: Any, like: DTensor) -> Tensor:
    if isinstance(value, DTensor):
        return value
    whole = value.detach().to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
