"""Leaves of the batch that are no tensors: numbers and strings are those of each real step, others are not read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from lightning_autoparallel.capture.plain import is_number, is_plain
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.watch import Watcher
from lightning_autoparallel.errors import CaptureError


class Unread:
    """A leaf that the step may hand on; to read it is a decision on its value."""

    def __init__(self, watcher: Watcher, name: str, text: str) -> None:
        self._watcher, self.name, self._text = watcher, name, text

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._watcher.counters[self.name])

    def __getattr__(self, name: str) -> Any:
        return getattr(read_leaf(self), name)

    def __format__(self, spec: str) -> str:
        return format(read_leaf(self), spec)

    __str__ = __repr__ = lambda self: str(read_leaf(self))


def _asks(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(read_leaf(self), *map(read_leaf, others))


_UNARY: dict[str, Callable[..., Any]] = {
    "hash": hash,
    "len": len,
    "iter": iter,
    "bool": bool,
    "int": int,
    "float": float,
}
_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "mod", "mul", "getitem", "contains", "fspath", "index")
for _name, _function in _UNARY.items():
    setattr(Unread, f"__{_name}__", _asks(_function))
for _name in _BINARY:
    setattr(Unread, f"__{_name}__", _asks(getattr(operator, _name, None) or __import__("os").fspath))
Unread.__radd__ = lambda self, other: other + read_leaf(self)  # type: ignore[attr-defined]


def read_leaf(value: Any) -> Any:
    """The leaf that a stand-in stands for, as a decision; anything else as it is.

    Raises:
        CaptureError: the leaf is nothing that can be compared at each step.
    """
    if type(value) is not Unread:
        return value
    real = value._watcher.counters[value.name]
    if not is_plain(real):
        raise CaptureError(
            f"{user_line()} reads {value._text}, a {type(real).__name__}: the step would keep the first batch's; give "
            "it tensors, numbers and strings, in dicts, lists, tuples or dataclasses"
        )
    name = value.name
    return value._watcher.decide(value._text, lambda counters: counters[name], exact=True)


def leaf_counters(leaves: Mapping[int, Any]) -> dict[str, Any]:
    """Leaves that are no tensors, as numbers are named that a real step is given."""
    return {_name_of(position): leaf for position, leaf in leaves.items()}


def stand_in_for_leaf(watcher: Watcher, position: int, path: str, leaf: Any) -> Any:
    """What the step is given in the place of a leaf that is no tensor."""
    if leaf is None or isinstance(leaf, bool):
        return leaf  # part of what the engine tells variants by
    name = _name_of(position)
    watcher.counters.setdefault(name, leaf)
    if is_number(leaf):
        return watcher.value(name)
    return Unread(watcher, name, f"batch leaf {path!r}")


def _name_of(position: int) -> str:
    return f"batch leaf {position}"
