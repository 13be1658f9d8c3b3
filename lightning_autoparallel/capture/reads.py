"""What a step's Python reads and writes beside tensors, noted while the step is captured; see README.md."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from threading import get_ident
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    MemberDescriptorType,
    MethodType,
    UnionType,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_autoparallel.capture.classes import MetClasses, is_users
from lightning_autoparallel.capture.instrument import Instrument, can_instrument, has_hidden_state
from lightning_autoparallel.capture.memos import Memos
from lightning_autoparallel.capture.own_attributes import OwnAttributes, asks_for_one
from lightning_autoparallel.capture.places import MISSING, Place, attributes_of, item_of
from lightning_autoparallel.capture.plain import (
    Freezer,
    Frozen,
    TooLargeError,
    contents,
    frozen_value,
    is_fixed,
    is_number,
)
from lightning_autoparallel.capture.sources import is_engine_file, shown_hook, user_line
from lightning_autoparallel.capture.stand_ins import DictStandIn, ListStandIn
from lightning_autoparallel.capture.watch import Watcher, is_watched
from lightning_autoparallel.torch_compat.tracing import is_real

_MODULE_FILES = {sys.modules[nn.Module.__module__].__file__, sys.modules["torch.nn.modules.container"].__file__}
# Of the step's own modules: inputs of the graph, or part of what the engine tells variants by.
_TABLES = ("_parameters", "_buffers", "_modules")
_OF_MODULES = {*_TABLES, "training"}
_BACKWARD_HOOKS = {"_backward_hooks", "_backward_pre_hooks"}
_OWN_FILES = {__file__, *(sys.modules[f"{__package__}.{name}"].__file__ for name in ("instrument", "stand_ins"))}
# Python's own, of which a step's results do not depend.
_NO_STATE = {"logging", "threading", "_thread", "weakref", "typing", "contextvars", "abc", "warnings", "importlib"}
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_STATEFUL = (GeneratorType, CoroutineType, AsyncGeneratorType, io.IOBase, *_GENERATORS)


# What is of one run.
_OF_RUN = ("written", "changed", "restored", "_stand_ins", "_swapped", "_outside")
_CACHING_FILE = nn.modules.rnn.__file__  # its layers keep a list of their weights


@dataclass(frozen=True, kw_only=True)
class Read:
    """One value that a step read: what was there, and the line that read it."""

    place: Place
    frozen: Frozen
    line: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """One place that a step assigned or deleted: what was there before the run, and the line.

    ``value`` is what it wrote where that has been taken away again; else it is found there. ``by`` is the file whose
    code assigned it.
    """

    place: Place
    before: Any
    line: str
    value: Any = None
    is_undone: bool = False
    by: str = ""

    @property
    def is_cache(self) -> bool:
        """Whether it is of a layer of torch's own, which fills it again where it is missing."""
        return self.by == _CACHING_FILE


class StateReads:
    """Follows one capture of the step from ``module`` on; ``numbers`` are the places whose numbers are inputs.

    What it ``knows`` is what the step can reach: an object that the step makes itself is none of it. ``reads`` are of
    all runs of the step, ``written`` and ``changed`` of the last one.
    """

    def __init__(
        self, module: nn.Module, watcher: Watcher, numbers: frozenset[Any] = frozenset(), memos: Memos | None = None
    ) -> None:
        self.module, self.watcher, self.numbers, self.memos = module, watcher, numbers, memos or Memos()
        self.reads: dict[Any, Read] = {}
        self.written: dict[Any, Written] = {}
        self.changed: dict[int, tuple[ListStandIn | DictStandIn, str]] = {}
        self.tensors: dict[int, tuple[Tensor, Place | None]] = {}
        self.on, self._thread = False, 0
        self._swapped: list[tuple[Place, Any]] = []
        self.restored: str | None = None  # a container that the last run changed in place, behind its stand-ins
        self._outside: dict[Any, tuple[Place, Any, str]] = {}
        self._number_reads: set[Any] = set()
        self._stand_ins: dict[int, ListStandIn | DictStandIn] = {}
        self._known: dict[int, tuple[Any, str]] = {}
        self.classes = MetClasses()
        self._instrument = Instrument(self)
        self._own_tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._own_modules = {id(child) for child in module.modules()}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Classes of what the step can reach are instrumented inside."""
        self._meet_module(self.module, "self")
        try:
            yield
        finally:
            self.on = False
            self._instrument.undo()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """One run of the step: what it reads and writes is noted, and attributes are put back."""
        self.written, self.changed, self._stand_ins, self._swapped = {}, {}, {}, []
        self._outside, self.restored = {}, None
        self.classes.start()
        self.on, self._thread = True, get_ident()
        try:
            yield
        finally:
            self.on = False
            self._note_outside()
            for place, value in reversed(self._swapped):
                place.write(value)
            containers = self.memos.restore_containers(self.reads, self.written.values(), self.meet)
            attributes = self.classes.undo()
            self.restored = containers or attributes

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Another run is recorded inside; what the last one has written and changed is known again afterwards."""
        kept = {name: vars(self)[name] for name in _OF_RUN}
        try:
            yield
        finally:
            vars(self).update(kept)

    def _note_outside(self) -> None:
        """What the run has put into globals and closures, and in the place of stand-ins, is written at each step."""
        swapped = {place.identity: value for place, value in self._swapped}
        for place, given, line in self._outside.values():
            now = place.read()
            if now is not given:
                before = swapped.get(place.identity, given)
                self.written[place.identity] = Written(place=place, before=before, line=line, value=now, is_undone=True)
                place.write(before)

    def written_numbers(self) -> list[Any]:
        """Identities of places where the run found a number and left a value."""
        entries = [
            container.place_of(key)
            for container, _ in self.changed.values()
            if isinstance(container, DictStandIn)
            for key in container.written
        ]
        attributes = [written.place for written in self.written.values() if is_number(written.before)]
        return [place.identity for place in (*attributes, *entries) if place.identity in self._number_reads]

    def undo_writes(self) -> None:
        """Attributes that the run assigned are as they were before it."""
        for written in reversed(self.written.values()):
            written.place.write(written.before)

    def changed_behind(self) -> str | None:
        """A list or dict that the run has changed past the methods of its stand-in."""
        found = (made for made in self._stand_ins.values() if made.is_changed_behind())
        return next((made.place.text for made in found if made.place is not None), None)

    def writes(self) -> int:
        """How many places and containers the run has changed so far."""
        return len(self.written) + len(self.changed)

    def mirror(self, paths: list[str]) -> None:
        """What the code of the second of these submodules reads is read of the others, which run the same code."""
        template, *others = paths[1:-1]
        inside = {id(child): name for name, child in self.module.get_submodule(template).named_modules()}
        own = [read for read in self.reads.values() if id(read.place.root) in inside]
        for other in others:
            block = self.module.get_submodule(other)
            for read in own:
                child = block.get_submodule(inside[id(read.place.root)])
                place = read.place.at(child, self._known[id(child)][1])
                if read.frozen.content and read.frozen.kind is not object:
                    self._note_content(place, place.read())
                else:
                    self._keep(place, read.frozen)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Control is in torch: what it reads is not the step's."""
        was, self.on = self.on, False
        try:
            yield
        finally:
            self.on = was

    # what instrumented classes tell

    def knows(self, owner: Any) -> bool:
        """Whether an object's attributes are noted now."""
        return self.on and id(owner) in self._known and get_ident() == self._thread

    def on_read(self, owner: Any, name: str, original: Callable[[Any, str], Any]) -> Any:
        """The attribute as the step gets it."""
        if is_engine_file(sys._getframe(2).f_code.co_filename):
            return original(owner, name)
        if name.startswith("__"):
            return self._special(owner, name, original)
        own = attributes_of(owner)
        is_own, before = name in own, own.get(name, MISSING)
        static_in, static = _static(type(owner), name)
        if static is not MISSING and hasattr(type(static), "__set__"):
            value = original(owner, name)
            return self.note(self._place("slot", owner, name), value) if _is_slot(static) else value
        if is_own:
            return self.note(self._place("attribute", owner, name), before)
        try:
            value = original(owner, name)
        except AttributeError:
            self.note(self._place("attribute", owner, name), MISSING)
            self._note_entry(owner, name)
            raise
        if name not in attributes_of(owner):  # a cached property has filled it by now
            self.note(self._place("attribute", owner, name), MISSING)
        if static is not MISSING and not hasattr(type(static), "__get__"):
            return self.note(self._place("attribute", static_in, name), value)
        return value

    def on_write(self, owner: Any, name: str) -> None:
        """An attribute is about to be assigned or deleted."""
        static = _static(type(owner), name)[1]
        if static is not MISSING and hasattr(type(static), "__set__") and not _is_slot(static):
            return  # what the property's code assigns is seen
        place = self._place("slot" if _is_slot(static) else "attribute", owner, name)
        if place.identity not in self.written:
            self.written[place.identity] = Written(place=place, before=place.read(), line=user_line(), by=_writer())

    def _special(self, owner: Any, name: str, original: Callable[[Any, str], Any]) -> Any:
        value = original(owner, name)
        if name == "__dict__" and not _asked_by_torch():
            if isinstance(owner, nn.Module):
                if asks_for_one(sys._getframe(3)):
                    return OwnAttributes(owner, self._known[id(owner)][1], self.note)
                raise self.watcher.refuse(
                    f"{user_line()} reads all attributes of a module at once: they change as it trains"
                )
            self._note_content(self._place("slot", owner, name), value)
        return value

    def _place(self, kind: Any, owner: Any, name: str) -> Place:
        text = owner.__name__ if isinstance(owner, type) else self._known[id(owner)][1]
        return Place(kind, owner, name, f"{text}.{name}")

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer of the module, outside of the run."""
        return id(tensor) in self._own_tensors

    def is_reached(self, value: Any) -> bool:
        """Whether the step found an object, rather than made it."""
        return id(value) in self._known

    # what was read

    def note(self, place: Place, value: Any) -> Any:
        """The step reads ``value`` there; what it is given instead."""
        if place.identity in self.written or is_watched(value):
            return value
        if isinstance(place.owner, nn.Module) and (place.key in _OF_MODULES or _is_engines(value)):
            if place.key in _OF_MODULES and id(place.owner) not in self._own_modules:
                self._note_content(place, value)
            return value
        if place.key in _BACKWARD_HOOKS and isinstance(place.owner, nn.Module) and value:
            raise self.watcher.refuse(f"{shown_hook(value)} is a backward hook of {place.text[: -len(place.key) - 1]}")
        if isinstance(value, Tensor):
            return self._tensor(place, value)
        if is_number(value) and place.identity in self.numbers:
            return self.watcher.at_place(place, value)
        if is_number(value):
            self._number_reads.add(place.identity)
        known = self.reads.get(place.identity)
        if type(value) in (list, dict) and not _asked_by_torch():
            if known is None:
                self._keep(place, Frozen(value=None, kind=type(value), content=False))
            return self._stand_in(place, value)
        self._note_content(place, value)
        return value

    def _note_entry(self, owner: Any, name: str) -> None:
        """A parameter, buffer or submodule, by its name, of a module that the step's own are not made of."""
        if not isinstance(owner, nn.Module) or id(owner) in self._own_modules:
            return
        tables = {key: attributes_of(owner).get(key, {}) for key in _TABLES}
        for key in [key for key in tables if name in tables[key]] or _TABLES:
            value = tables[key].get(name, MISSING)
            if not isinstance(value, Tensor) or is_real(value):
                of = self._place("attribute", owner, key)
                self._note_content(Place("item", of, name, self._place("attribute", owner, name).text), value)

    def _tensor(self, place: Place, value: Tensor) -> Tensor:
        if is_real(value):  # others are inputs of the graph, or made by the step
            self.tensors[id(value)] = value, place
        return value

    def note_classes(self, codes: Iterable[CodeType]) -> None:
        """Attributes of classes that these functions name are compared before each step."""
        for place, value, line in self.classes.places(codes):
            if place.identity not in self.reads:
                frozen = frozen_value(value, place.text)
                self.reads[place.identity] = Read(place=place, frozen=frozen, line=line)

    def see_hooks_as_they_are(self) -> None:
        """Tables of hooks are compared as they are now, without those that were there for the capture."""
        for identity, read in list(self.reads.items()):
            if isinstance(read.place.owner, nn.Module) and "hooks" in str(read.place.key):
                now = Freezer(lambda value, text: None).freeze(read.place.read(), read.place.text)
                self.reads[identity] = replace(read, frozen=now)

    def note_as_it_is(self, place: Place, value: Any) -> None:
        """The step reads ``value`` where nothing can stand in for it."""
        if type(value) in (ListStandIn, DictStandIn):
            return  # what is read of it is told
        if isinstance(value, Tensor):
            self._tensor(place, value)
        elif self.on and not is_watched(value):
            self._note_content(place, value)
        if self.on and place.kind in ("global", "cell"):
            if is_number(value):
                self._number_reads.add(place.identity)
            self._outside.setdefault(place.identity, (place, place.read(), user_line()))

    def _note_content(self, place: Place, value: Any) -> None:
        self._swap(place, value)
        if place.identity in self.reads or (place.identity in self.numbers and is_number(value)):
            return
        try:
            self._keep(place, Freezer(self.meet).freeze(value, place.text))
        except TooLargeError:
            raise self.watcher.refuse(
                f"{user_line()} reads {place.text}, which is too large to be compared before every step"
            ) from None

    def _swap(self, place: Place, value: Any) -> None:
        """Put stand-ins where the step finds numbers that are inputs, and where nothing else can."""
        if isinstance(value, (dict, list)) and self.numbers:
            for key, item in list((contents(value) or {}).items()):
                self._swap(item_of(place, key), item)
        elif place.identity in self.numbers and is_number(value):
            place.write(self.watcher.at_place(place, value))
            self._swapped.append((place, value))
            self._outside.setdefault(place.identity, (place, place.read(), user_line()))

    def _keep(self, place: Place, frozen: Frozen) -> None:
        self.reads[place.identity] = Read(place=place, frozen=frozen, line=user_line())

    def _stand_in(self, place: Place, value: Any) -> Any:
        if id(value) not in self._stand_ins:
            made = ListStandIn if type(value) is list else DictStandIn
            self._stand_ins[id(value)] = made(value, place, self)  # type: ignore[abstract]
        return self._stand_ins[id(value)]

    # the owner of stand-ins

    def item(self, place: Place, value: Any) -> Any:
        """The step reads one entry."""
        return self.note(place, value) if self.on else value

    def whole(self, place: Place, real: Any) -> None:
        """The step reads which entries there are; each of them is noted by itself."""
        if self.on:
            size = Place("size", place, None, f"the entries of {place.text}")
            self._keep(size, Frozen(value=size.read(), kind=type(size.read())))

    def changed_in_place(self, container: ListStandIn | DictStandIn) -> None:
        """The step changes a container."""
        self.changed.setdefault(id(container), (container, user_line()))

    # objects on the way

    def meet(self, value: Any, text: str) -> None:
        """The step can reach an object: from now on its attributes are noted.

        Raises:
            CaptureError: it has a state that nothing tells of.
        """
        if id(value) in self._known or value is MISSING:
            return
        self._meet_parts(value, text)
        if is_fixed(value):
            return
        if type(value).__module__.partition(".")[0] in _NO_STATE:
            return
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), (value, None))
        elif isinstance(value, nn.Module):
            self._meet_module(value, text)
        elif isinstance(value, _STATEFUL) or _moves_on_in_c(type(value)):
            raise self.watcher.refuse(
                f"{user_line()} reads {text} ({type(value).__name__}), which moves on when it is used"
            )
        elif has_hidden_state(type(value)):
            raise self.watcher.refuse(
                f"{user_line()} reads {text} ({type(value).__name__}), whose state nothing tells of: keep it out "
                "of the step"
            )
        elif can_instrument(type(value)):
            self._known[id(value)] = (value, text)
            self.meet_class(type(value), type(value).__name__)
            self._instrument.add(type(value))

    def _meet_parts(self, value: Any, text: str) -> None:
        """What Python's own objects, which never change, lead to."""
        if isinstance(value, MethodType):
            self._follow(value.__self__, f"{text}.__self__")
        elif isinstance(value, (GenericAlias, UnionType)):
            for part in value.__args__:
                if isinstance(part, type):
                    self.meet_class(part, text)

    def meet_class(self, cls: type, text: str) -> None:
        """The step can reach a class; objects that it has, of other classes of the user's, are told of too."""
        for name, value in self.classes.meet(cls):
            self._follow(value, f"{text}.{name}")

    def _follow(self, value: Any, text: str) -> None:
        """The step can reach an object of the user's by another: it is told of, or let be where nothing could tell."""
        kind = type(value)
        tells = can_instrument(kind) and not has_hidden_state(kind) and not isinstance(value, _STATEFUL)
        if is_users(kind) and (tells or isinstance(value, nn.Module)):
            self.meet(value, text)

    def _meet_module(self, module: nn.Module, text: str) -> None:
        for name, child in module.named_modules():
            self._known[id(child)] = (child, f"{text}.{name}" if name else text)
            self.meet_class(type(child), type(child).__name__)
            self._instrument.add(type(child))
        if module is not self.module:
            for tensor in (*module.parameters(), *module.buffers()):
                self.tensors.setdefault(id(tensor), (tensor, None))


def _asked_by_torch() -> bool:
    """Whether torch's own bookkeeping of modules reads, rather than the code of some module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _OWN_FILES and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename in _MODULE_FILES


def _writer() -> str:
    """The file whose code assigns an attribute."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _OWN_FILES and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_engines(value: Any) -> bool:
    """Whether a capture has put a function of its own into an object."""
    return isinstance(value, FunctionType) and is_engine_file(value.__code__.co_filename)


def _moves_on_in_c(cls: type) -> bool:
    """Whether instances are iterators that are not written in Python, where what they read and write is seen."""
    found = _static(cls, "__next__")[1]
    return found is not MISSING and not isinstance(found, FunctionType)


def _is_slot(static: Any) -> bool:
    return type(static) is MemberDescriptorType


def _static(cls: type, name: str) -> tuple[Any, Any]:
    """The class of the hierarchy that has an attribute, and what it has."""
    for parent in cls.__mro__:
        if name in vars(parent):
            return parent, vars(parent)[name]
    return None, MISSING
