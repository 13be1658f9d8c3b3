"""What the step's Python calls and finds in globals and closures, seen by the interpreter's profile hook."""

from __future__ import annotations

import builtins
import contextlib
import dis
import gc
import io
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from lightning_autoparallel.capture.conversions import CONVERTERS, only_called
from lightning_autoparallel.capture.places import MISSING, Place
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.sources import is_user_file, user_line

_RANKS = ("get_rank", "get_world_size", "get_node_local_rank", "get_global_rank", "get_group_rank")
_GENERATORS = (random.Random, np.random.RandomState)
_COLLECTIVES: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
)
_COLLECTIVES += ("broadcast_object_list", "gather", "scatter", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_COLLECTIVES += ("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "gather_object", "new_group")


# Of torch, for the whole process: what they do is no part of a graph.
_SETTINGS: tuple[str, ...] = ("set_default_dtype", "set_default_device", "use_deterministic_algorithms")
_SETTINGS += ("manual_seed", "seed", "set_rng_state")
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_RANK_ZERO = os.path.join("lightning_utilities", "core", "rank_zero.py")


class StepCalls:
    """While ``watching``, tells ``reads`` of globals and closures of user files, and refuses what has no guard."""

    def __init__(self, reads: StateReads) -> None:
        self._reads = reads
        self.seen: set[CodeType] = set()
        self._asks = _questions()
        self._clocks = {id(function): f"{function.__module__}.{function.__name__}" for function in _clocks()}
        self._converted: list[tuple[dict[str, Any], str]] = []
        self._draws = {
            id(getattr(owner, name)) for owner in (random, np.random) for name in dir(owner) if name[0] != "_"
        }
        self.entered = self.drew_at = "?"
        self._opens = {id(builtins.open), id(io.open), id(os.open)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The step runs inside."""
        before: Any = sys.getprofile()
        self.seen.clear()
        self.entered = self.drew_at = "?"
        sys.setprofile(self._event)
        try:
            with contextlib.ExitStack() as stack:
                for name in _SETTINGS:
                    stack.enter_context(mock.patch.object(torch, name, self._refused(name)))
                yield
        finally:
            for table, name in self._converted:
                del table[name]
            self._converted.clear()
            if before is None or callable(before):
                sys.setprofile(before)
            else:  # a profiler written in C
                sys.setprofile(None)
                before.enable()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Control is in torch."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _refused(self, name: str) -> Callable[..., Any]:
        real = getattr(torch, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if _is_machinery(sys._getframe(1)):
                return real(*args, **kwargs)
            raise self._reads.watcher.refuse(f"{user_line()} calls torch.{name}, which would happen at capture only")

        return refuse

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._reads.on:
            return
        if event == "c_call":
            self._builtin(frame, argument)
        elif event == "call":
            code = frame.f_code
            if code.co_filename.endswith(_RANK_ZERO) and code.co_name == "wrapped_fn":
                raise self._reads.watcher.refuse(f"{user_line(frame)} asks for the ranks (rank_zero_only)")
            if code in self._asks and frame.f_back is not None and not _is_machinery(frame.f_back):
                raise self._reads.watcher.refuse(f"{user_line(frame)} {self._asks[code]}")
            if code is _ENVIRONMENT:
                self._note(*_variable(frame))
            if code not in self.seen and is_user_file(code.co_filename):
                self.seen.add(code)
                with self._reads.paused():
                    found = _function_of(frame)
                self._enter(frame, found)

    def _builtin(self, frame: FrameType, function: Any) -> None:
        if id(function) in self._draws or isinstance(getattr(function, "__self__", None), _GENERATORS):
            self.drew_at = user_line(frame)
        if id(function) in self._clocks and is_user_file(frame.f_code.co_filename):
            raise self._reads.watcher.refuse(
                f"{user_line(frame)} asks for the time ({self._clocks[id(function)]}), which would stay that of capture"
            )
        if id(function) in self._opens and is_user_file(frame.f_code.co_filename):
            raise self._reads.watcher.refuse(f"{user_line(frame)} opens a file, which would happen at capture only")

    def _enter(self, frame: FrameType, function: FunctionType | None) -> None:
        """A function of the user's is called for the first time in this run."""
        table = frame.f_globals
        if self.entered == "?":
            self.entered = user_line(frame)
        for name in only_called(frame.f_code.co_filename):
            if name not in table:
                table[name] = CONVERTERS[name]
                self._converted.append((table, name))
        module = str(table.get("__name__", "?")).rpartition(".")[2]
        for name, attributes in _global_names(frame.f_code):
            if name in CONVERTERS and table.get(name) is CONVERTERS[name]:
                continue
            if name in table or attributes is None:
                self._note(Place("global", table, name, f"{module}.{name}"), table.get(name, MISSING))
                for attribute in attributes or ():
                    self._of_module(table[name], attribute)
        if function is None:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place("cell", cell, None, f"{name} (of a closure)")
            self._note(place, place.read())
            if place.read() is not MISSING:
                frame.f_locals[name] = place.read()  # the interpreter writes these back when the hook returns
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._note(Place("cell", _Held(value), None, f"a default of {function.__name__}"), value)

    def _of_module(self, module: Any, name: str) -> None:
        if (
            isinstance(module, ModuleType)
            and name in vars(module)
            and is_user_file(getattr(module, "__file__", None) or "<built in>")
        ):
            self._note(Place("global", vars(module), name, f"{module.__name__}.{name}"), vars(module)[name])

    def _note(self, place: Place, value: Any) -> None:
        if isinstance(value, type):
            self._reads.classes.meet(value)
        if not isinstance(value, ModuleType):
            self._reads.note_as_it_is(place, value)


def _variable(frame: FrameType) -> tuple[Place, Any]:
    """The variable of the environment that is asked for."""
    key = frame.f_locals["key"]
    place = Place("global", os.environ, key, f"os.environ[{key!r}]")
    return place, place.read()


class _Held:
    """A value in a place of its own: only its content can change."""

    def __init__(self, value: Any) -> None:
        self.cell_contents = value


def _is_machinery(caller: FrameType) -> bool:
    """Whether torch or the engine asks, not the step."""
    name = str(caller.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("torch", __name__.partition(".")[0])


@cache
def _global_names(code: CodeType) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """The globals that a function loads, each with the attributes that are read from it right away.

    Of those that it assigns, that may not exist yet, the attributes are None.
    """
    found: dict[str, dict[str, None]] = {}
    instructions = list(dis.get_instructions(code))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            attributes = found.setdefault(str(instruction.argval), {})
            if following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes[str(following.argval)] = None
    stored = {str(instruction.argval) for instruction in instructions if instruction.opname == "STORE_GLOBAL"}
    loaded = {name: tuple(attributes) for name, attributes in found.items()}
    return tuple({**loaded, **dict.fromkeys(stored)}.items())


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame: one of its code, and of several the one with the frame's closure."""
    code = frame.f_code
    if not code.co_freevars and not code.co_argcount and not code.co_kwonlyargcount:
        return None
    candidates = [found for found in _candidates(frame) if found.__code__ is code]
    if not candidates:
        candidates = [found for found in gc.get_referrers(code) if isinstance(found, FunctionType)]
    matching = [found for found in candidates if _has_closure_of(found, frame)]
    return matching[0] if matching else None


def _candidates(frame: FrameType) -> Iterator[FunctionType]:
    code = frame.f_code
    named: list[Any] = [frame.f_globals.get(code.co_name)]
    if code.co_argcount:
        owner = frame.f_locals.get(code.co_varnames[0])
        named += [vars(parent).get(code.co_name) for parent in type(owner).__mro__]
    for found in named:
        inner = getattr(found, "__func__", getattr(found, "fget", found))
        if isinstance(inner, FunctionType):
            yield inner


def _has_closure_of(function: FunctionType, frame: FrameType) -> bool:
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = frame.f_locals
    return all(name not in values or _same_cell(cell, values[name]) for name, cell in names)


def _same_cell(cell: Any, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


def _questions() -> dict[CodeType, str]:
    """Python functions whose answer is of one rank or one moment -> what the step does with them."""
    asks = {name: f"asks for the ranks (torch.distributed.{name})" for name in _RANKS}
    asks |= {name: f"talks to other ranks (torch.distributed.{name})" for name in _COLLECTIVES}
    found = {
        _code(getattr(dist, name)): f"{text}: a captured step is one program"
        for name, text in asks.items()
        if hasattr(dist, name)
    }
    for function in (uuid.uuid1, uuid.uuid4):
        found[_code(function)] = f"makes an id (uuid.{function.__name__}), which would stay that of capture"
    return found


def _code(function: Callable[..., Any]) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def _clocks() -> list[Any]:
    names = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")
    return [*(getattr(time, name) for name in names), os.urandom]
