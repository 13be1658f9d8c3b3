"""Optimizers that Lightning is not given: attributes of modules and callbacks, which step them by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer


def held_optimizers(holders: Iterable[object]) -> list[Optimizer]:
    """Those in attributes of ``holders``, or in lists, tuples and dicts there, each once."""
    found = (optimizer for holder in holders for value in vars(holder).values() for optimizer in _optimizers_in(value))
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Optimizer))
    elif type(value) is dict:
        yield from (item for item in value.values() if isinstance(item, Optimizer))
