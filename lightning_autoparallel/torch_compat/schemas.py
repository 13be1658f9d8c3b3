"""What operators' schemas, which torch keeps under private names, say of arguments and of the memory of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, str]  # of an argument: its position and its name


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema; those left at their defaults are not named."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def result_places(target: Any) -> tuple[Place | None, ...]:
    """For each result of an operator, the argument whose memory it shows or is; None for memory of its own.

    Empty for what is no operator of torch's dispatcher.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    schema = target._schema
    named = {
        name: (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }
    viewed = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None]

    def place_of(alias: Any) -> Place | None:
        if alias is None:
            return None
        # Lists of views (`Tensor(a)[]`) do not repeat the name of their alias set: they show the one viewed argument.
        return next((named[name] for name in alias.before_set if name in named), viewed[0] if viewed else None)

    return tuple(place_of(result.alias_info) for result in schema.returns)


def views_first_argument(target: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may copy shows the memory of its first argument, tried on these (meta) tensors."""
    result = target(*args, **kwargs)
    return bool(result.untyped_storage()._cdata == args[0].untyped_storage()._cdata)
