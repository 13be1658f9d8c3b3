"""Torch's functions on numbers that change from step to step: the number becomes an input of the graph.

Results have the dtype that torch gives with a Python number in that position. Where torch takes a number only (a
dropout rate, a size), the number is a decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.capture.watch import Watched, exact_value, is_watched
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

# Tensors stand for numbers here, and give what numbers would.
_ELEMENTWISE = {"add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "floordiv"}
_ELEMENTWISE |= {"floor_divide", "remainder", "mod", "fmod", "pow", "rsub", "eq", "ne", "lt", "le", "gt", "ge"}
_ELEMENTWISE |= {"where", "masked_fill", "fill", "lerp", "copysign", "maximum", "minimum", "atan2", "xlogy", "hypot"}
_ELEMENTWISE |= {"greater", "greater_equal", "less", "less_equal", "not_equal"}
_REFLECTED = {f"r{name}" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")}
_MAKERS = {"tensor", "as_tensor", "asarray", "scalar_tensor"}


def has_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a stand-in for a number is among the arguments of a call."""
    return any(map(is_watched, args)) or any(map(is_watched, tree_flatten((args, kwargs))[0]))


def call_with_numbers(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` of torch with stand-ins for numbers among the arguments."""
    name = _plain_name(function)
    if name in _MAKERS:
        return _made(args, kwargs)
    if name in ("full", "full_like", "new_full", "new_tensor"):
        return _filled(name, args, kwargs)
    if name in ("clamp", "clip"):
        return _clamped(function, args, kwargs)
    if is_watched(kwargs.get("alpha")) and name in ("add", "sub", "subtract"):
        scaled = (*args[:-1], torch.mul(args[-1], _fed(kwargs["alpha"], [args[-1]])))
        return function(*scaled, **{key: value for key, value in kwargs.items() if key != "alpha"})
    if name in _ELEMENTWISE | _REFLECTED or name == "setitem":
        args = tuple(exact_value(arg) if name == "setitem" and i == 1 else arg for i, arg in enumerate(args))
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if tensors:
            args = tuple(_fed(value, tensors) if is_watched(value) else value for value in args)
            kwargs = {key: _fed(value, tensors) if is_watched(value) else value for key, value in kwargs.items()}
    args, kwargs = tree_map(exact_value, args), tree_map(exact_value, kwargs)
    return function(*args, **kwargs)


def _plain_name(function: Callable[..., Any]) -> str:
    """``mul`` for ``torch.mul``, ``Tensor.mul_``, ``Tensor.__mul__`` and ``Tensor.__imul__``."""
    name = str(getattr(function, "__name__", ""))
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return bare[1:] if bare[:1] == "i" and bare[1:] in _ELEMENTWISE else bare
    return name.removesuffix("_")


def _fed(number: Watched, tensors: list[Tensor]) -> Tensor:
    """The number as a tensor without dims that promotes as the number does."""
    value = number._watcher.feed(number)
    kind = torch.result_type(tensors[0], number._now())
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, torch.result_type(tensor, number._now()))
    if any(tensor.dim() for tensor in tensors):
        kind = _wide(kind)
    return value.to(kind)


def _wide(kind: torch.dtype) -> torch.dtype:
    """Among tensors with dims, one without does not widen the result: the number keeps its digits."""
    if kind.is_complex:
        return torch.float64 if kind == torch.complex128 else torch.float32
    if kind.is_floating_point:
        return torch.float64 if kind == torch.float64 else torch.float32
    return torch.int64


def _dtype_of(numbers: list[Any]) -> torch.dtype:
    return torch.get_default_dtype() if any(isinstance(number, float) for number in numbers) else torch.int64


def _made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    data = kwargs["data"] if "data" in kwargs else args[0]
    positional = args[1] if len(args) > 1 and isinstance(args[1], torch.dtype) else None
    kind, device = kwargs.get("dtype") or positional, kwargs.get("device")
    made = _stacked(data, kind or _dtype_of(tree_flatten(data)[0]))
    made = made.to(device) if device is not None else made
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _stacked(data: Any, kind: torch.dtype) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(item, kind) for item in data])
    return data._watcher.feed(data).to(kind) if is_watched(data) else torch.tensor(data, dtype=kind)


def _filled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``full`` and its relatives, of a number that changes."""
    options = {key: value for key, value in kwargs.items() if key in ("dtype", "device") and value is not None}
    owner = args[0] if name != "full" else None
    if name == "new_tensor":
        data = args[1] if len(args) > 1 else kwargs["data"]
        return _stacked(data, options.get("dtype", args[0].dtype)).to(options.get("device", args[0].device))
    rest = args if name == "full" else args[1:]
    number = rest[-1] if is_watched(rest[-1]) else kwargs["fill_value"]
    size = args[0].shape if name == "full_like" else tree_map(exact_value, rest[0] if rest else kwargs["size"])
    kind = options.get("dtype", owner.dtype if owner is not None else _dtype_of([number]))
    device = options.get("device", owner.device if owner is not None else None)
    if not is_watched(number):
        return torch.full(size, number, dtype=kind, device=device)
    return number._watcher.feed(number).to(dtype=kind, device=device).expand(size).clone()


def _clamped(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bounds = dict(zip(("min", "max"), args[1:], strict=False)) | {
        k: v for k, v in kwargs.items() if k in ("min", "max")
    }
    if _plain_name(function) != function.__name__:  # in place
        return function(args[0], **{key: exact_value(bound) for key, bound in bounds.items()})
    result = args[0]
    for key, bound in bounds.items():
        if bound is not None:
            result = function(result, **{key: _fed(bound, [args[0]]) if is_watched(bound) else bound})
    return result
