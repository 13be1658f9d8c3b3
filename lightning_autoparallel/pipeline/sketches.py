"""Values by a few numbers, so that ranks can tell whether they have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.interception import without_function_modes
from lightning_autoparallel.torch_compat.tracing import is_real

_EVERY = (1, 2, 3, 7)  # so many elements one is added up
_PIECE = 2**20  # elements that are added up at once, in 64 bits
_PLAIN = (bool, int, float, str, type(None))


@torch.no_grad()
def sketch(value: Any) -> Any:
    """Of a tensor some sums, and at last that of absolute values, on its device; of other things what can be told."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, _PLAIN) else repr(value) if isinstance(value, complex) else _kind(value)
    with without_function_modes():
        if value.layout != torch.strided or value.is_meta or not is_real(value):
            return [_kind(value), str(value.dtype), list(value.shape)]
        numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        flat = numbers.detach().reshape(-1)
        sums = torch.zeros(len(_EVERY) + 1, dtype=torch.float64, device=flat.device)
        for piece in flat.split(_PIECE) if flat.numel() else ():
            wide = piece.to(torch.float64)
            sums += torch.stack([*(wide[::every].sum() for every in _EVERY), wide.abs().sum()])
        return sums


def spelled(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The same with numbers in the place of sums, for which each device is waited for once."""
    sums = [value for mine in values for value in mine if isinstance(value, Tensor)]
    numbers: dict[int, list[float]] = {}
    for device in {tensor.device for tensor in sums}:
        there = [tensor for tensor in sums if tensor.device == device]
        rows = torch.stack(there).tolist()
        numbers.update({id(tensor): row for tensor, row in zip(there, rows, strict=True)})
    return [[numbers[id(value)] if isinstance(value, Tensor) else value for value in mine] for mine in values]


def _kind(value: Any) -> str:
    return type(value).__name__
