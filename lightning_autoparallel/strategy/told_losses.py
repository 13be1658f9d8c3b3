"""A closure's loss as one number, and the number that an optimizer is told in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = (int, float, np.integer, np.floating)


def number_of(loss: Any) -> float | None:
    """What a loss is, if it is one real number: a tensor or an array of one element, whatever its shape, or a number.

    A truth value is none: it has no mean.
    """
    if isinstance(loss, Tensor):
        is_one = loss.numel() == 1 and loss.layout == torch.strided and not loss.is_complex()
        return float(loss.detach()) if is_one and loss.dtype != torch.bool else None
    if isinstance(loss, np.ndarray):
        return float(loss.reshape(())) if loss.size == 1 and loss.dtype.kind in "iuf" else None
    return float(loss) if isinstance(loss, _NUMBERS) and not isinstance(loss, bool) else None


def told_as(loss: Any, mean: float) -> Any:
    """The ``mean`` of several ranks' losses as ``loss`` was given; whole numbers, whose mean may be none, as floats."""
    if isinstance(loss, Tensor):
        dtype = loss.dtype if loss.is_floating_point() else torch.get_default_dtype()
        told = torch.full_like(loss.detach(), mean, dtype=dtype)
        return loss + (told - loss.detach()) if loss.requires_grad else told
    if isinstance(loss, np.ndarray):
        return np.full_like(loss, mean, dtype=loss.dtype if loss.dtype.kind == "f" else np.float64)
    return type(loss)(mean) if isinstance(loss, (float, np.floating)) else mean
