"""Classes, and functions, that a step's Python meets: what it reads of them by name, and what it writes there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from lightning_autoparallel.capture.places import MISSING, Place
from lightning_autoparallel.capture.plain import Frozen, contents, frozen_value, is_plain
from lightning_autoparallel.capture.sources import is_user_file

_Met = type | FunctionType


class MetClasses:
    """Classes and functions of the user's files; nothing tells of access to their attributes, so these are compared."""

    def __init__(self) -> None:
        self._before: dict[_Met, dict[str, Any]] = {}
        self._contents: dict[_Met, dict[str, Frozen]] = {}

    def meet(self, cls: type) -> list[tuple[str, Any]]:
        """From now on what is assigned to the class, or to one that it inherits from, is seen.

        Returns:
            The objects of the user's classes that they have, by name, where they were not met before.
        """
        found = []
        for parent in cls.__mro__:
            if parent not in self._before and is_users(parent):
                self._remember(parent)
                found += [(name, value) for name, value in self._before[parent].items() if is_users(type(value))]
        return found

    def meet_function(self, function: FunctionType) -> None:
        """The same of a function's attributes."""
        if function not in self._before:
            self._remember(function)

    def start(self) -> None:
        """A run of the step begins."""
        for cls in list(self._before):
            self._remember(cls)

    def _remember(self, cls: _Met) -> None:
        self._before[cls] = _attributes(cls)
        self._contents[cls] = {
            name: frozen_value(value, name)
            for name, value in self._before[cls].items()
            if contents(value) is not None and not is_plain(value)
        }

    def undo(self) -> str | None:
        """Take back what the run has assigned; the name of the first one."""
        found = None
        for cls, before in self._before.items():
            now = _attributes(cls)
            for name in before.keys() | now.keys():
                old = before.get(name, MISSING)
                if now.get(name, MISSING) is not old:
                    found = found or f"{cls.__name__}.{name}"
                    _put_back(cls, name, old)
            for name, frozen in self._contents[cls].items():
                if frozen.difference(before[name]) is not None:
                    found = found or f"{cls.__name__}.{name}"
                    frozen.restore()
        return found

    def places(self, codes: Iterable[CodeType]) -> Iterator[tuple[Place, Any, str]]:
        """The attributes that functions of these ``codes`` may have read, with their values and such a function."""
        named = {name: code for code in codes for name in names_in(code)}
        for cls, attributes in self._before.items():
            for name in sorted(named.keys() & attributes.keys()):
                line = f"{os.path.basename(named[name].co_filename)}:{named[name].co_firstlineno}"
                yield Place("attribute", cls, name, f"{cls.__name__}.{name}"), attributes[name], line


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names that a function's code has in it, and the texts, which ``getattr`` may be given."""
    texts, waiting = set(code.co_names), list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            texts.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            waiting += constant
    return frozenset(texts)


def is_users(cls: type) -> bool:
    """Whether a class is from a file of the user's."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_user_file(file)


def _put_back(cls: _Met, name: str, old: Any) -> None:
    kind = type if isinstance(cls, type) else FunctionType
    kind.__delattr__(cls, name) if old is MISSING else kind.__setattr__(cls, name, old)


def _attributes(cls: _Met) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("__")}
