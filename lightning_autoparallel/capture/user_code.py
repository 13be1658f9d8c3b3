"""What the step's Python calls and finds in globals and closures, seen by the interpreter's profile hook."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

from lightning_autoparallel.capture.classes import names_in
from lightning_autoparallel.capture.conversions import CONVERTERS, only_called
from lightning_autoparallel.capture.kept_results import KeptResults
from lightning_autoparallel.capture.outside import asked_in_c, asked_in_python, may_ask, refused_outside
from lightning_autoparallel.capture.places import MISSING, Place
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.sources import is_engine_file, is_user_file, user_line

_GENERATORS = (random.Random, np.random.RandomState)
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_NESTED = 3  # modules in modules whose attributes a function may read


class StepCalls:
    """While ``watching``, tells ``reads`` of globals and closures of user files, and refuses what has no guard."""

    def __init__(self, reads: StateReads) -> None:
        self._reads = reads
        self.seen: set[CodeType] = set()
        # Code of which nothing is asked, and the engine's in it, by id, kept so that the ids stay theirs. Code is
        # looked up millions of times: its hash is slow.
        self._quiet: dict[int, CodeType] = {}
        self._engines: dict[int, CodeType] = {}
        self._kept = KeptResults()
        self._made: dict[int, Any] = {}  # objects whose making the run has seen, kept so that their ids stay theirs
        self._converted: list[tuple[dict[str, Any], str]] = []
        self._outer: set[FrameType] = set()  # of code that had called the step
        self._draws = {
            id(getattr(owner, name)) for owner in (random, np.random) for name in dir(owner) if name[0] != "_"
        }
        self.entered = self.drew_at = "?"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The step runs inside."""
        before: Any = sys.getprofile()
        self.seen.clear()
        self.entered = self.drew_at = "?"
        outer, self._outer = self._outer, set(_callers(sys._getframe()))
        sys.setprofile(self._hook())
        try:
            with refused_outside(self._reads.watcher):
                yield
        finally:
            self._kept.forget()
            self._made.clear()
            self._outer = outer
            self._quiet.clear()
            self._engines.clear()
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

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Torch has called code of the user's."""
        before = sys.getprofile()
        sys.setprofile(self._hook())
        try:
            yield
        finally:
            sys.setprofile(before)

    def named(self, names: Collection[str]) -> tuple[str, str] | None:
        """The line of a function that the run has called and that has one of ``names`` in it, and that name."""
        for code in self.seen if names else ():
            for name in names_in(code):
                if name in names:
                    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}", name
        return None

    def _hook(self) -> Callable[[FrameType, str, Any], None]:
        """What the interpreter calls at each event; most are of the engine's own code and torch's."""
        reads, quiet, engines = self._reads, self._quiet, self._engines

        def event(frame: FrameType, kind: str, argument: Any) -> None:
            if kind == "c_return" or not reads.on:
                return
            code = frame.f_code
            if kind == "c_call":
                if id(code) not in engines:
                    self._builtin(frame, argument)
            elif id(code) not in quiet:
                self._event(frame, code, kind, argument)

        return event

    def _event(self, frame: FrameType, code: CodeType, kind: str, argument: Any) -> None:
        if kind == "call":
            self._called(frame, code)
            if self._is_quiet(code):
                self._quiet[id(code)] = code
                if is_engine_file(code.co_filename):
                    self._engines[id(code)] = code
        elif kind == "return":
            self._refuse(self._kept.returned(code, argument, self._reads.writes()), frame)

    def _is_quiet(self, code: CodeType) -> bool:
        """Whether no call of it asks or tells anything: most of torch's and Python's own."""
        if is_user_file(code.co_filename) or code is _ENVIRONMENT or code.co_name == "__init__":
            return False
        return not may_ask(code) and not self._kept.keeps(code)

    def _called(self, frame: FrameType, code: CodeType) -> None:
        self._refuse(asked_in_python(frame), frame)
        if code.co_name == "__init__" and code.co_argcount:
            made = frame.f_locals.get(code.co_varnames[0])
            if not self._reads.is_reached(made):
                self._made[id(made)] = made
        if code is _ENVIRONMENT:
            self._note(*_variable(frame))
        if code not in self.seen and is_user_file(code.co_filename):
            self.seen.add(code)
            with self._reads.paused():
                found = _functions_of(frame)
            self._enter(frame, found)
        self._kept.called(code, self._reads.writes())

    def _builtin(self, frame: FrameType, function: Any) -> None:
        if id(function) in self._draws or isinstance(getattr(function, "__self__", None), _GENERATORS):
            self.drew_at = user_line(frame)
        if function is os.urandom or is_user_file(frame.f_code.co_filename):
            self._refuse(asked_in_c(function, frame), frame)

    def _refuse(self, what: str | None, frame: FrameType) -> None:
        if what is not None:
            raise self._reads.watcher.refuse(f"{user_line(frame)} {what}")

    def _enter(self, frame: FrameType, functions: Sequence[FunctionType]) -> None:
        """A function of the user's is called for the first time in this run."""
        table = frame.f_globals
        if self.entered == "?":
            self.entered = user_line(frame)
        for name in only_called(frame.f_code.co_filename):
            if name not in table:
                table[name] = CONVERTERS[name]
                self._converted.append((table, name))
        module = str(table.get("__name__", "?")).rpartition(".")[2]
        modules = list(_imported(frame.f_code, table))
        for name, is_assigned in _global_names(frame.f_code):
            if name in CONVERTERS and table.get(name) is CONVERTERS[name]:
                continue
            if name in table or is_assigned:
                self._note(Place("global", table, name, f"{module}.{name}"), table.get(name, MISSING))
                modules += [table[name]] if isinstance(table.get(name), ModuleType) else []
        for imported in modules:
            self._of_module(imported, frame.f_code.co_names, _NESTED)
        for function, runs in [(function, _has_closure_of(function, frame)) for function in functions]:
            self._of_function(function, frame if runs else None)

    def _of_function(self, function: FunctionType, frame: FrameType | None) -> None:
        """What a function's closure and defaults hold; ``frame`` is its own, if it runs."""
        running = {} if frame is None else frame.f_locals
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place("cell", cell, None, f"{name} (of a closure)")
            if id(place.read()) in self._made or (frame is not None and self._is_of_run(name, cell, frame)):
                continue
            self._note(place, place.read())
            if place.read() is not MISSING:
                running[name] = place.read()  # the interpreter writes these back when the hook returns
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._note(Place("cell", _Held(value), None, f"a default of {function.__name__}"), value)

    def _is_of_run(self, name: str, cell: Any, frame: FrameType) -> bool:
        """Whether a closure's variable is one of a function of the run, which is still inside of that: it may change as
        the run goes on, and each run has its own.
        """
        code = frame.f_code
        for caller in _callers(frame):
            if caller in self._outer:
                return False
            if any(constant is code for constant in caller.f_code.co_consts):
                if name in caller.f_code.co_cellvars:
                    return name not in caller.f_locals or _is_variable(cell, caller, name)
                code = caller.f_code
        return False

    def _of_module(self, module: ModuleType, names: Sequence[str], depth: int) -> None:
        """A function may read the attributes of these ``names``, also of modules in it."""
        if not is_user_file(getattr(module, "__file__", None) or "<built in>"):
            return
        for name in names:
            value = vars(module).get(name, MISSING)
            if isinstance(value, ModuleType) and depth:
                self._of_module(value, names, depth - 1)
            elif value is not MISSING:
                self._note(Place("global", vars(module), name, f"{module.__name__}.{name}"), value)

    def _note(self, place: Place, value: Any) -> None:
        if isinstance(value, type):
            self._reads.meet_class(value, value.__name__)
        elif isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename):
            self._reads.classes.meet_function(value)
        if not isinstance(value, ModuleType):
            self._reads.note_as_it_is(place, value)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _variable(frame: FrameType) -> tuple[Place, Any]:
    """The variable of the environment that is asked for."""
    key = frame.f_locals["key"]
    place = Place("global", os.environ, key, f"os.environ[{key!r}]")
    return place, place.read()


class _Held:
    """A value in a place of its own: only its content can change."""

    def __init__(self, value: Any) -> None:
        self.cell_contents = value


@cache
def _global_names(code: CodeType) -> tuple[tuple[str, bool], ...]:
    """The globals that a function loads, and those that it assigns, which may not exist yet."""
    instructions = list(dis.get_instructions(code))
    loaded = [str(i.argval) for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    assigned = {str(i.argval) for i in instructions if i.opname == "STORE_GLOBAL"}
    return tuple((name, name in assigned) for name in dict.fromkeys([*loaded, *assigned]))


def _imported(code: CodeType, table: dict[str, Any]) -> Iterator[ModuleType]:
    """The modules that a function imports by itself, if they are there already."""
    for name, level in _imports(code):
        package = str(table.get("__package__") or "").split(".")
        parts = [*package[: len(package) - level + 1], *filter(None, [name])] if level else [name]
        found = sys.modules.get(".".join(parts))
        if found is not None:
            yield found


@cache
def _imports(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Names of modules, and how many packages up they are looked for."""
    instructions = list(dis.get_instructions(code))
    named = [i for i, instruction in enumerate(instructions) if instruction.opname == "IMPORT_NAME"]
    return tuple((str(instructions[i].argval), int(instructions[i - 2].argval or 0)) for i in named)


def _functions_of(frame: FrameType) -> list[FunctionType]:
    """The function that runs in a frame; of a function made in another one, all that share its code.

    Each has a closure and defaults of its own, and later calls may be of any of them.
    """
    code = frame.f_code
    if not code.co_freevars and not code.co_argcount and not code.co_kwonlyargcount:
        return []
    if "<locals>" not in code.co_qualname:
        candidates = [found for found in _candidates(frame) if found.__code__ is code]
        if candidates:
            return candidates[:1]
    return [found for found in gc.get_referrers(code) if isinstance(found, FunctionType) and found.__code__ is code]


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


def _is_variable(cell: Any, frame: FrameType, name: str) -> bool:
    """Whether a cell is a variable of a function that runs: what is put into one is found in the other."""
    value = frame.f_locals[name]
    if not _same_cell(cell, value):
        return False
    cell.cell_contents = probe = object()
    try:
        return bool(frame.f_locals[name] is probe)
    finally:
        cell.cell_contents = value
        frame.f_locals  # noqa: B018 - before Python 3.13 a copy, which forgets the probe by this
