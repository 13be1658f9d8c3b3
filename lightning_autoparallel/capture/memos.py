"""Containers that a run of the step has changed: content that is put back, and tables in which libraries remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autoparallel.capture.places import attributes_of
from lightning_autoparallel.capture.plain import Freezer, Frozen, TooLargeError, contents, is_plain
from lightning_autoparallel.capture.sources import is_installed
from lightning_autoparallel.capture.watch import is_watched
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.errors import CaptureError

if TYPE_CHECKING:
    from lightning_autoparallel.capture.reads import Read

_MOST_OBJECTS = 10_000  # that an entry may lead to


class Memos:
    """Tables of installed libraries that runs of one capture have added entries to.

    A first run finds out what such a table then holds: it has to be the step that finds it there. So runs of a first
    capture add to the tables as they were, those of a second one find what was added, and both have to be one.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, tuple[Frozen, Frozen, str]] = {}  # before and after a run, and text, by place
        self._first: CapturedGraph | None = None

    def restore(self) -> None:
        """All tables have the content again that they had before the first run."""
        for before, _, _ in self._tables.values():
            before.restore()
        self._tables.clear()
        self._first = None

    def are_found(self, captured: CapturedGraph) -> bool:
        """Whether the step has found all that it remembers; else it is to be captured again, when it does.

        Raises:
            CaptureError: it is another step where it does.
        """
        if not self._tables:
            return True
        if self._first is None:
            self._first = captured
            for _, after, _ in self._tables.values():
                after.restore()
            return False
        if _are_one(self._first, captured):
            self._tables.clear()  # their content stays, and the first graph is let go of
            self._first = None
            return True
        text = next(text for _, _, text in self._tables.values())
        raise CaptureError(
            f"{captured.name} changes {text} in place (or what it calls does) and then is another step, which would "
            "happen at capture only"
        )

    def restore_containers(self, reads: dict[Any, Read], meet: Callable[[Any, str], None]) -> str | None:
        """Give containers that a run changed in place their content again; the text of the first one.

        That of what is no table, or was changed where it should have been found.
        """
        found = None
        for identity, read in list(reads.items()):
            if read.frozen.parts is None or type(read.frozen.value) in (tuple, frozenset):
                continue
            if self._first is not None and identity in self._tables:
                read = reads[identity] = replace(read, frozen=replace(read.frozen, grows=True))
            if replace(read.frozen, grows=False).difference(read.frozen.value) is None:
                continue
            remembered = _remembered(read, meet)
            if remembered is not None and read.frozen.grows:
                reads[identity] = replace(read, frozen=remembered)
                continue
            if remembered is not None and self._first is None:
                self._tables[identity] = read.frozen, remembered, read.place.text
            else:
                found = found or read.place.text
            read.frozen.restore()
        return found


def _are_one(one: CapturedGraph, other: CapturedGraph) -> bool:
    constants = [tuple(each.constants.values()) for each in (one, other)]
    return (
        str(one.graph_module.graph) == str(other.graph_module.graph)
        and repr(one.static_outputs) == repr(other.static_outputs)
        and len(constants[0]) == len(constants[1])
        and all(map(_same_constant, *constants))
    )


def _same_constant(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    strided = one.layout is torch.strided and other.layout is torch.strided
    return strided and one.dtype == other.dtype and torch.equal(one, other)


def _remembered(read: Read, meet: Callable[[Any, str], None]) -> Frozen | None:
    """A table of a library's as it is now, if all that the run did was to add entries that hold no tensors.

    Where it ``grows``, classes: other runs compute with tensors of other ones.
    """
    frozen, place = read.frozen, read.place
    if place.kind != "global" or frozen.kind is not dict or not is_installed(place.owner.get("__file__") or ""):
        return None
    known, now = frozen.parts or {}, contents(frozen.value) or {}
    if any(isinstance(key, Tensor) for key in now) or replace(frozen, grows=True).difference(frozen.value) is not None:
        return None
    added = {key: now[key] for key in now.keys() - known.keys()}
    if frozen.grows and not all(isinstance(key, type) for key in added):
        return None
    if _holds_tensors(added):
        return None
    try:
        after = Freezer(meet).freeze(frozen.value, place.text)
    except (TooLargeError, CaptureError):  # what else the run has changed is put back all the same
        return None
    return replace(after, grows=True)


def _holds_tensors(value: Any) -> bool:
    """Whether a value is, or leads to, a tensor or a number of the run; or to more objects than are looked at."""
    ahead_of, seen = [value], dict[int, Any]()
    while ahead_of:
        value = ahead_of.pop()
        if isinstance(value, Tensor) or is_watched(value):
            return True
        if is_plain(value) or isinstance(value, (type, ModuleType)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if len(seen) > _MOST_OBJECTS:
            return True
        ahead_of += _parts(value).values()
    return False


def _parts(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, CellType):
        return {} if value == CellType() else {"contents": value.cell_contents}
    if isinstance(value, FunctionType):
        return {"closure": value.__closure__, "defaults": value.__defaults__, "keywords": value.__kwdefaults__}
    if isinstance(value, MethodType):
        return {"self": value.__self__, "function": value.__func__}
    slots = {name: getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)}
    return {**(contents(value) or {}), **attributes_of(value), **slots}


def _slots(kind: type) -> list[str]:
    """The attributes that a class keeps in slots, as it calls them itself."""
    return [name for name, found in vars(kind).items() if isinstance(found, MemberDescriptorType)]
