"""``parameter.data = tensor`` and ``parameter.grad = tensor`` where the parameter is a DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_autoparallel.torch_compat.dtensors import is_placed_alike, laid_out_like, part_of

_ALIGNED = 16  # bytes
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad


Told = Callable[[DTensor, Tensor, str], object]  # a parameter, what is about to be assigned, and to what of it


@contextlib.contextmanager
def assigned_in_shards(told: Told = lambda parameter, value, of: None) -> Iterator[None]:
    """While open, the first gives the parameter another shard, and a whole gradient is cut as its parameter is.

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


def is_aligned(tensor: Tensor) -> bool:
    """Whether it begins as memory that torch allocates does, which compiled code takes its inputs to do."""
    return tensor.data_ptr() % _ALIGNED == 0


@torch.no_grad()
def set_data(tensor: DTensor, value: Tensor) -> None:
    """Let ``tensor`` hold the memory of ``value``, a whole tensor's part of it, or a copy where that is cut otherwise.

    Whoever has kept the memory that it had (as ``tensor.data``) keeps what is in it, as of any tensor.

    Raises:
        RuntimeError: it is of another shape or dtype.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RuntimeError(
            f"a parameter that lies in shards has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and .data = "
            f"tensor of shape {tuple(value.shape)} and dtype {value.dtype} would change that: do so before training"
        )
    shards = _cut(value, tensor)
    if not is_placed_alike(tensor, shards):
        shards = shards.redistribute(tensor.device_mesh, tensor.placements)
    own = part_of(tensor)
    given = laid_out_like(own, part_of(shards).detach())
    own.data = given if is_aligned(given) else given.clone()


def _set_data(tensor: DTensor, value: Tensor, told: Told) -> None:
    told(tensor, value, "")
    set_data(tensor, value)


def _set_gradient(tensor: DTensor, value: Tensor | None, told: Told) -> None:
    is_whole = isinstance(value, Tensor) and value.shape == tensor.shape
    if is_whole and not isinstance(value, DTensor):
        told(tensor, value, "the gradient of ")  # type: ignore[arg-type]
    _GRADIENT.__set__(tensor, _cut(value, tensor) if is_whole else value)


def _delete_gradient(tensor: DTensor) -> None:
    _GRADIENT.__delete__(tensor)


def _cut(value: Any, like: DTensor) -> DTensor:
    if isinstance(value, DTensor):
        return value
    whole = value.detach().to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
