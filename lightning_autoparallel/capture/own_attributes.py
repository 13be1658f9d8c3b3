"""A module's ``__dict__`` where a step asks it for one name: that attribute, and nothing of the others."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

from lightning_autoparallel.capture.places import MISSING, Place, attributes_of

_LOADS = ("LOAD_CONST", "LOAD_FAST", "LOAD_DEREF")


class OwnAttributes:
    """Of one ``owner``, found at ``text``; it lives for the one instruction that ``asks_for_one``."""

    def __init__(self, owner: Any, text: str, note: Callable[[Place, Any], Any]) -> None:
        self._owner, self._text, self._note = owner, text, note

    def _one(self, name: Any) -> Any:
        value = attributes_of(self._owner).get(name, MISSING)
        return self._note(Place("attribute", self._owner, name, f"{self._text}.{name}"), value)

    def __contains__(self, name: Any) -> bool:
        return self._one(name) is not MISSING

    def __getitem__(self, name: Any) -> Any:
        found = self._one(name)
        if found is MISSING:
            raise KeyError(name)
        return found

    def get(self, name: Any, default: Any = None) -> Any:
        """The attribute; only this one is read."""
        found = self._one(name)
        return default if found is MISSING else found


def asks_for_one(frame: FrameType) -> bool:
    """Whether what a frame is loading is used for one entry at once: ``in``, ``[name]`` or ``.get``, and not kept.

    Told by the instructions that follow; no for ones that are not known.
    """
    return frame.f_lasti in _asking(frame.f_code)


@cache
def _asking(code: CodeType) -> frozenset[int]:
    """Where a function loads a ``__dict__`` to ask it for one entry, by offset."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for here, first, second in zip(instructions, instructions[1:], instructions[2:], strict=False):
        is_asked = (
            first.opname == "CONTAINS_OP"
            or (_is_method(first) and first.argval == "get")
            or (first.opname in _LOADS and second.opname == "BINARY_SUBSCR")
        )
        if here.opname == "LOAD_ATTR" and here.argval == "__dict__" and is_asked:
            found.add(here.offset)
    return frozenset(found)


def _is_method(instruction: dis.Instruction) -> bool:
    """Whether a method is loaded to be called; since Python 3.12 the lowest bit tells it from an attribute."""
    marked = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)
    return instruction.opname == "LOAD_METHOD" or marked
