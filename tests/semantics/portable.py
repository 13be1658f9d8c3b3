"""Values as plain data that crosses processes: whole tensors, numbers, containers; anything else by its attributes."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.numerics.training import full

PLAIN = (bool, int, float, str, bytes, type(None))


def portable(value: Any, depth: int = 6) -> Any:
    """The value as it is now; what is left of a capture comes out as a text that equals no value."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value).clone() if value.dtype.kind in "biuf" else value.tolist()
    if depth == 0:
        return f"a {type(value).__name__}, too deep"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PLAIN):
        return type(value).__mro__[1](value) if type(value).__mro__[1] in PLAIN else str(value)
    if isinstance(value, Mapping):
        return {str(name): portable(item, depth - 1) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(portable(item, depth - 1) for item in value)
    if isinstance(value, list | tuple | deque):
        return [portable(item, depth - 1) for item in value]
    if callable(value) or isinstance(value, itertools.count):
        return repr(value).partition(" at 0x")[0]
    return (
        {"a": type(value).__name__, **portable(dict(vars(value)), depth - 1)}
        if hasattr(value, "__dict__")
        else repr(value)
    )


def _tensor(value: Tensor) -> Any:
    """Whole tensors; a fake one, or what a gradient of functorch is made of, is what no run may leave behind."""
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer, DTensor) or torch._is_functional_tensor(value):
        return f"a {type(value).__name__} left by a capture"
    return full(value).cpu()
