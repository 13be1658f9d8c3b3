"""Containers that a run of the step has changed: content that is put back, and what libraries remember in theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.places import MISSING, Place, attributes_of
from lightning_autoparallel.capture.plain import Freezer, Frozen, TooLargeError, contents, is_plain
from lightning_autoparallel.capture.sources import is_installed
from lightning_autoparallel.capture.watch import is_watched
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.errors import CaptureError

if TYPE_CHECKING:
    from lightning_autoparallel.capture.reads import Read, StateReads, Written

_MOST_OBJECTS = 10_000  # that an entry may lead to


class Memos:
    """Tables of installed libraries that runs of one capture have added entries to, and modules' tables of hooks.

    A first run finds out what such a table then holds, or hangs hooks into modules and sets a flag that says so: it has
    to be the step that finds all that there. So runs of a first capture add to the tables as they were, those of a
    second one find what was added, and both have to be one.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, tuple[Frozen, Frozen, str]] = {}  # before and after a run, and text, by place
        self._flags: dict[Any, tuple[Place, Any]] = {}  # with what was there before a run
        self._first: CapturedGraph | None = None
        self._first_writes: frozenset[Any] = frozenset()  # places

    def restore(self) -> None:
        """All tables have the content again that they had before the first run."""
        for before, _, _ in self._tables.values():
            before.restore()
        for place, was in self._flags.values():
            place.write(was)
        self._forget()

    def _forget(self) -> None:
        self._tables.clear()
        self._flags.clear()
        self._first = None

    def are_found(self, captured: CapturedGraph, reads: StateReads) -> bool:
        """Whether the step has found all that it remembers; else it is to be captured again, when it does.

        ``reads`` know what its last run has written.

        Raises:
            CaptureError: it is another step where it does.
        """
        if not self._tables:
            return True
        if self._first is None:
            self._first, self._first_writes = captured, self._writes(reads)
            for _, after, _ in self._tables.values():
                after.restore()
            for place, _ in self._flags.values():
                place.write(True)
            return False
        if _are_one(self._first, captured) and self._writes(reads) == self._first_writes:
            self._forget()  # their content stays, and the first graph is let go of
            return True
        text = next(text for _, _, text in self._tables.values())
        raise CaptureError(
            f"{captured.name} changes {text} in place (or what it calls does) and then is another step, which would "
            "happen at capture only"
        )

    def _writes(self, reads: StateReads) -> frozenset[Any]:
        """Where the last run has written, but for flags: a first run's alone would be lost."""
        attributes = {place for place, written in reads.written.items() if not written.is_cache}
        containers = {made.place.identity for made, _ in reads.changed.values() if made.place is not None}
        return frozenset(attributes | containers) - self._flags.keys()

    def restore_containers(
        self, reads: dict[Any, Read], written: Collection[Written], meet: Callable[[Any, str], None]
    ) -> str | None:
        """Give containers that a run changed in place their content again; the text of the first one.

        That of what is no table, or was changed where it should have been found. Attributes that it has ``written`` are
        still there.
        """
        found = None
        for identity, read in list(reads.items()):
            if read.frozen.parts is None or type(read.frozen.value) in (tuple, frozenset):
                continue
            if self._first is not None and identity in self._tables and not _is_of_hooks(read.place):
                read = reads[identity] = replace(read, frozen=replace(read.frozen, grows=True))
            if replace(read.frozen, grows=False).difference(read.frozen.value) is None:
                continue
            remembered = _remembered(read, meet)
            if remembered is not None and read.frozen.grows:
                reads[identity] = replace(read, frozen=remembered)
                continue
            if remembered is not None and self._first is None:
                self._tables[identity] = read.frozen, remembered, read.place.text
                if _is_of_hooks(read.place):
                    self._flags |= {
                        each.place.identity: (each.place, each.before) for each in filter(_is_flag, written)
                    }
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
    """A table of a library's, or of hooks, as it is now, if all that the run did was to add entries without tensors.

    Where it ``grows``, classes: other runs compute with tensors of other ones.
    """
    frozen, place = read.frozen, read.place
    if _is_of_hooks(place):
        return _with_hooks(read, meet)
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
    after = _frozen_now(read, meet)
    return None if after is None else replace(after, grows=True)


def _with_hooks(read: Read, meet: Callable[[Any, str], None]) -> Frozen | None:
    """A module's table of hooks as it is now, if all that the run did was to add functions of a library's."""
    known, now = read.frozen.parts or {}, contents(read.frozen.value) or {}
    if replace(read.frozen, grows=True).difference(read.frozen.value) is not None:
        return None
    added = [now[key] for key in now.keys() - known.keys()]
    if not all(type(hook) is FunctionType and is_installed(hook.__code__.co_filename) for hook in added):
        return None
    return None if _holds_tensors(added) else _frozen_now(read, meet)


def _frozen_now(read: Read, meet: Callable[[Any, str], None]) -> Frozen | None:
    try:
        return Freezer(meet).freeze(read.frozen.value, read.place.text)
    except (TooLargeError, CaptureError):  # what else the run has changed is put back all the same
        return None


def _is_of_hooks(place: Place) -> bool:
    """Whether a module keeps its hooks there."""
    return place.kind == "attribute" and isinstance(place.owner, nn.Module) and str(place.key).endswith("_hooks")


def _is_flag(written: Written) -> bool:
    """Whether a library's code has noted on a module that something is done."""
    place = written.place
    was_unset = any(written.before is value for value in (MISSING, None, False))
    return (
        place.kind == "attribute"
        and isinstance(place.owner, nn.Module)
        and is_installed(written.by)
        and was_unset
        and place.read() is True
    )


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
