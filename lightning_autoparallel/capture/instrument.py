"""Classes whose attribute access is told to a listener, for the duration of a capture."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_TRANSPARENT = {object, dict, list, tuple, set, frozenset, BaseException, Exception, types.SimpleNamespace}
_METHODS = ("__getattribute__", "__setattr__", "__delattr__")
_MARK = "_told_to_listener"


class Listener(Protocol):
    """Is told of attribute access on objects that it knows."""

    def knows(self, owner: Any) -> bool: ...
    def on_read(self, owner: Any, name: str, original: Callable[[Any, str], Any]) -> Any: ...
    def on_write(self, owner: Any, name: str) -> None: ...


def can_instrument(cls: type) -> bool:
    """Whether a class lets its attribute access be replaced."""
    flags = cls.__flags__
    bound = type(cls).__name__ == "pybind11_type"  # of C++, which keeps what Python would patch
    return (
        bool(flags & _HEAP) and not flags & _IMMUTABLE and not bound and not issubclass(cls, (type, Tensor, enum.Enum))
    )


def has_hidden_state(cls: type) -> bool:
    """Whether instances keep something in C, where no attribute tells of it; torch's own classes are left alone."""
    for parent in cls.__mro__:
        if parent in _TRANSPARENT or parent.__module__.partition(".")[0] == "torch":
            return False
        slots = vars(parent).get("__slots__", ())
        known = len((slots,) if isinstance(slots, str) else tuple(slots)) + 2  # its dict and its weak references
        base = parent.__base__ or object
        if not parent.__flags__ & _HEAP or parent.__basicsize__ - base.__basicsize__ > 8 * known:
            return True
    return False


class Instrument:
    """Patches classes as they are met; ``undo`` puts back what was there."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._classes: set[type] = set()
        self._stack = ExitStack()

    def add(self, cls: type) -> None:
        """Tell the listener of what is read and written on instances of ``cls`` from now on."""
        if cls in self._classes or not can_instrument(cls):
            return
        self._classes.add(cls)
        for name in _METHODS:
            original = getattr(cls, name)
            if not hasattr(original, _MARK):
                self._patch(cls, name, _wrapper(name, original, self._listener))

    def undo(self) -> None:
        """Classes are as they were."""
        self._stack.close()
        self._classes.clear()

    def _patch(self, cls: type, name: str, wrapper: Any) -> None:
        setattr(wrapper, _MARK, True)
        if name in vars(cls):
            self._stack.callback(type.__setattr__, cls, name, vars(cls)[name])
        else:
            self._stack.callback(type.__delattr__, cls, name)
        type.__setattr__(cls, name, wrapper)


def _wrapper(name: str, original: Any, listener: Listener) -> Any:
    # `knows` is asked first: most access is torch's own, while the step does not run.
    def getattribute(self: Any, attribute: str) -> Any:
        return listener.on_read(self, attribute, original) if listener.knows(self) else original(self, attribute)

    def setattribute(self: Any, attribute: str, value: Any) -> None:
        if listener.knows(self):
            listener.on_write(self, attribute)
        original(self, attribute, value)

    def delattribute(self: Any, attribute: str) -> None:
        if listener.knows(self):
            listener.on_write(self, attribute)
        original(self, attribute)

    return {"__getattribute__": getattribute, "__setattr__": setattribute, "__delattr__": delattribute}[name]
