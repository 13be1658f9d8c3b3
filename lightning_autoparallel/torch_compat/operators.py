"""Schemas of operators, which torch keeps under private names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema; those left at their defaults are not named."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
