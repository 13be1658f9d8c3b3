"""``StepState``: all that one capture of a step follows of its Python, and what each real step makes of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.guards import Difference, StateGuards
from lightning_autoparallel.capture.leaf_stand_ins import Unread, read_leaf
from lightning_autoparallel.capture.memos import Memos
from lightning_autoparallel.capture.messages import Messages
from lightning_autoparallel.capture.numbers import call_with_numbers, has_number
from lightning_autoparallel.capture.own_backwards import OwnBackwards
from lightning_autoparallel.capture.places import Place
from lightning_autoparallel.capture.plain import is_fixed, is_plain
from lightning_autoparallel.capture.randomness import generators_kept
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.replaced import REPLACED
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.stand_ins import DictStandIn, ListStandIn, without_stand_ins
from lightning_autoparallel.capture.user_code import StepCalls
from lightning_autoparallel.capture.watch import NeedsNumbers, Watched, Watcher, math_functions, symbolic
from lightning_autoparallel.capture.writes import StateWrites
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx.values import Snapshot, digest
from lightning_autoparallel.torch_compat.tracing import DATA_DEPENDENT_ERRORS, is_real

_IN_PLACE = {
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor")
}
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_GRADIENT: Any = Tensor.grad.__set__  # type: ignore[attr-defined, union-attr]
_OF_BACKWARD: dict[Any, str] = {
    Tensor.grad.__get__: "reads the gradient",  # type: ignore[attr-defined, union-attr]
    Tensor.grad_fn.__get__: "reads the grad_fn",  # type: ignore[attr-defined, union-attr]
    _GRADIENT: "sets the gradient",
}
_ASSIGNS_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined, union-attr]
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_OF_MEMORY = {"data_ptr", "untyped_storage", "storage", "_typed_storage"}
_VALUE_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_AS_ARRAY = {"numpy", "__array__"}


class StepState:
    """The reads, writes, numbers and draws of one step; ``numbers`` are identities of places that are fed."""

    def __init__(
        self, module: nn.Module, watcher: Watcher | None = None, numbers: frozenset[Any] = frozenset()
    ) -> None:
        self.watcher = watcher or Watcher({})
        self.module, self.numbers = module, numbers
        self.needs_vector = False
        self.clones: frozenset[int] = frozenset()  # tensors of the batch that the step changes in place
        self.has_unread = self.reads_leaves = False
        self.memos = Memos()
        self._begin()

    def _begin(self) -> None:
        self._settings = torch_settings()
        self.reads = StateReads(self.module, self.watcher, self.numbers, self.memos)
        self.writes = StateWrites(self.reads)
        self.messages = Messages(self.watcher)
        self.feeds: dict[int, Place] = {}  # positions of the graph's constants that real steps read anew
        self._calls = StepCalls(self.reads)
        self.backwards = OwnBackwards(self.reads, self._calls)
        self._changed_at: dict[int, str] = {}  # tensors by identity -> the line that changed them in place
        self.changed_at: dict[int, str] = {}
        self.inputs: set[int] = set()  # parameters and buffers of the run, by identity
        self._values_read: set[int] = set()
        marks = [
            (mark, name)
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers())
            for mark in vars(tensor)
        ]
        self._marks = {mark: f"{name}.{mark}" for mark, name in marks if mark != "_is_param"}  # torch's own
        self._guards: StateGuards | None = None
        self._digests: dict[int, tuple[Snapshot, str]] = {}

    def start_over(self, numbers: frozenset[Any]) -> None:
        """Forget the capture so far; ``numbers`` are more places whose numbers are fed."""
        self.numbers |= numbers
        self.memos.restore()
        self.again()

    def again(self) -> None:
        """Forget the capture so far, but not what tables of libraries remember of it."""
        self.watcher.forget()
        self._begin()

    # while the step is captured

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around all runs of the step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.reads.installed())
            for name, function in math_functions().items():
                stack.enter_context(mock.patch.object(math, name, symbolic(f"math.{name}", function)))
            stack.callback(setattr, self.watcher, "vector", None)
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the step's own Python, once for each run.

        Raises:
            CaptureError: the step draws from a generator that the graph does not draw from, or changed a container
                that it was not given a stand-in for.
        """
        drawn: list[str] = []
        self.watcher.start()
        self._changed_at.clear()
        self.backwards.in_step = True
        with generators_kept(drawn), self.messages.held(), self.reads.recording(), self._calls.watching():
            try:
                yield
            finally:
                self.backwards.in_step = False
        if self.watcher.refusal is not None:
            raise self.watcher.refusal
        if drawn:
            line = self._calls.drew_at if self._calls.drew_at != "?" else self._calls.entered
            raise CaptureError(f"{line} draws from {drawn[0]}: every step would get the same numbers")
        marked = self._calls.named(self._marks)
        if marked is not None:
            line, mark = marked
            raise CaptureError(
                f"{line} may read {self._marks[mark]}: while it is captured, parameters have no attributes"
            )
        changed = self.reads.restored
        if changed is not None:
            raise CaptureError(
                f"{self._calls.entered} changes {changed} in place (or what it calls does), which would happen at "
                "capture only"
            )

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of torch for the step."""
        function = REPLACED.get(function, function)
        if not self.reads.on:  # torch runs a part of the step again, or this is no call of the step's
            return (call_with_numbers if has_number(args, kwargs) else _plainly)(function, args, kwargs)
        if self.watcher.in_backward:
            args, kwargs = self._arguments(function, args, kwargs)
            with self.reads.paused(), self._calls.paused():
                return (call_with_numbers if has_number(args, kwargs) else _plainly)(function, args, kwargs)
        if function in _DATA and args[0].requires_grad:
            raise self.watcher.refuse(
                f"{user_line()} goes around autograd (.data) to a parameter or what is computed with one: the "
                "graph would not see what is written there; use torch.no_grad() and copy_"
            )
        args, kwargs = self._arguments(function, args, kwargs)
        if args and isinstance(args[0], Tensor):
            self._changes(function, args)
        with self.reads.paused(), self._calls.paused():
            result = self._called(call_with_numbers if has_number(args, kwargs) else _plainly, function, args, kwargs)
        if args and isinstance(args[0], Tensor) and is_real(args[0]) and id(args[0]) not in self.reads.tensors:
            return result  # a part of what nothing tells of
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, Tensor) and is_real(leaf):
                self.reads.tensors.setdefault(id(leaf), (leaf, None))
        return result

    def _called(self, how: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return how(function, args, kwargs)
        except DATA_DEPENDENT_ERRORS:
            name = getattr(function, "__name__", "")
            self.watcher.refuse(f"{user_line()} reads a tensor's value ({name}), and goes on where that fails")
            raise

    def _changes(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """What a call does to its first argument beside computing with it."""
        name, tensor = str(getattr(function, "__name__", "")), args[0]
        what = _OF_BACKWARD.get(function)
        sets_requires_grad = name == "requires_grad_" or function == _ASSIGNS_REQUIRES_GRAD
        what = "sets requires_grad" if sets_requires_grad and id(tensor) in self.inputs else what
        what = "hangs a hook into the backward" if name in _HOOKS else what
        what = "asks for the memory" if name in _OF_MEMORY else what
        if what is not None:
            raise self.watcher.refuse(f"{user_line()} {what} of a tensor: it would happen at capture only")
        if writes_in_place(name):
            self._changed_at[id(tensor)] = user_line()

    def _arguments(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(self._argument(function, value, i == 0) for i, value in enumerate(args)),
            {name: self._argument(function, value, name == "out") for name, value in kwargs.items()},
        )

    def _argument(self, function: Callable[..., Any], value: Any, first: bool) -> Any:
        if isinstance(value, Tensor):
            if is_real(value):
                self._real(function, value, first)
            return value
        if type(value) in (ListStandIn, DictStandIn):
            value = without_stand_ins(value)
        if type(value) in (list, tuple):
            return type(value)(self._argument(function, item, False) for item in value)
        if isinstance(value, torch.Generator):
            raise self.watcher.refuse(
                f"{user_line()} draws from a torch.Generator: every step would get the same numbers"
            )
        return read_leaf(value) if type(value) is Unread else value

    def _real(self, function: Callable[..., Any], tensor: Tensor, first: bool) -> None:
        """A tensor of the outside is used: it must have been found where a real step finds it too."""
        name = str(getattr(function, "__name__", ""))
        if name == "__get__":
            return
        if self.reads.is_own(tensor):
            raise self.watcher.refuse(
                f"{user_line()} uses a parameter or buffer that it found elsewhere than in its module: the graph has "
                "one input for it, which is found there"
            )
        if id(tensor) not in self.reads.tensors:
            raise self.watcher.refuse(
                f"{user_line()} uses a tensor that is no input of the step, found where nothing tells of it; keep "
                "it as a buffer or an attribute of a module"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise self.watcher.refuse(
                f"{user_line()} uses a tensor that requires a gradient and is no parameter of the module: register it"
            )
        if name in _AS_ARRAY:
            raise self.watcher.refuse(
                f"{user_line()} reads a tensor's value ({name}): numpy would look at other memory than the tensor's; "
                "keep the array itself, or ask for tolist()"
            )
        if name in _VALUE_READS:
            self._values_read.add(id(tensor))
        if first and writes_in_place(name):
            raise self.watcher.refuse(
                f"{user_line()} changes a tensor in place ({name}) that is no buffer of the module: register it"
            )

    def leaf(self, leaf: Any) -> Any:
        """A leaf of the batch as the step gets it: a plain one itself, if the step needs that."""
        if self.reads_leaves and type(leaf) is Unread and is_plain(self.watcher.counters[leaf.name]):
            return read_leaf(leaf)
        return leaf

    def static_result(self, name: str, leaf: Any) -> Any:
        """A result that is no tensor, if a real step can give it again."""
        if type(leaf) in (Watched, Unread) or is_plain(leaf) or is_fixed(leaf) or self.reads.is_reached(leaf):
            return leaf
        raise self.watcher.refuse(
            f"{self.entered}: {name} returns a {type(leaf).__name__}, which is made at capture only: return tensors, "
            "numbers, strings and containers of them"
        )

    def count(self) -> int:
        """How many numbers the run has fed and places it has written so far."""
        return self.watcher.uses + self.reads.writes() + self.messages.count()

    @property
    def changes_anything(self) -> bool:
        """Whether each step has something to write, or to say, besides what its graph returns."""
        return self.writes.has_any or bool(self.messages.count())

    def note_changes(self, inputs: Sequence[Tensor]) -> None:
        """After a run: where it changed which of its ``inputs`` in place, by position."""
        lines = ((i, self._changed_at.get(id(tensor))) for i, tensor in enumerate(inputs))
        self.changed_at = {i: line for i, line in lines if line is not None}

    @property
    def entered(self) -> str:
        """The line where the last run began."""
        return self._calls.entered

    def check_counting(self) -> None:
        """After a run.

        Raises:
            NeedsNumbers: a number that the step read is one that it writes, so that each step finds another.
        """
        counted = frozenset(
            place for place in self.reads.written_numbers() if place not in self.numbers and place in self.reads.reads
        )
        if counted:
            raise NeedsNumbers(counted)

    def finish(self, constants: Sequence[Tensor]) -> None:
        """The step is captured; ``constants`` are what its graph took from outside."""
        self.messages.finish()
        self.reads.see_hooks_as_they_are()
        self.reads.note_classes(self._calls.seen | self.backwards.seen)
        guarded = []
        for tensor, place in self.reads.tensors.values():
            positions = [i for i, constant in enumerate(constants) if constant is tensor]
            if place is None or not positions or id(tensor) in self._values_read:
                guarded.append((tensor, place))
            else:
                self.feeds |= dict.fromkeys(positions, place)
        self._fed_like = {i: constants[i] for i in self.feeds}
        self._guards = StateGuards(self.reads.reads.values(), guarded)

    # at each real step

    def values(self, counters: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers that a real step finds: ``counters``, and those of places."""
        return {**counters, **{name: place.read() for name, place in self.watcher.places.items()}}

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the captured step is what Python would do now."""
        assert self._guards is not None
        if torch_settings() != self._settings:
            return False
        places = self.watcher.places
        if any(type(values[name]) is not type(self.watcher.counters[name]) for name in places):
            return False
        return (
            self._guards.hold()
            and all(_alike(self._fed_like[i], place.read()) for i, place in self.feeds.items())
            and all(guard.holds(values) for guard in self.watcher.guards)
        )

    def fed(self, values: Mapping[str, Any]) -> str:
        """What a real step takes from outside of its batch, as ranks can compare it: numbers, and tensors' digests.

        Sparse tensors are not looked into.
        """
        numbers = self.watcher.numbers(values)[: len(self.watcher.fed)]
        tensors = {position: place.read() for position, place in self.feeds.items()}
        digests = [self._digest(i, tensor) for i, tensor in tensors.items() if tensor.layout is torch.strided]
        return f"{numbers} {digests}" if numbers or digests else ""

    def _digest(self, position: int, tensor: Tensor) -> str:
        """It is read from the device once for each tensor that comes to lie there, and each change of one in place."""
        known = self._digests.get(position)
        if known is None or not known[0].is_of(tensor):
            known = self._digests[position] = Snapshot(tensor), digest(tensor)
        return known[1]

    def differences(self) -> list[Difference]:
        """What the step read and is not as it was."""
        assert self._guards is not None
        return self._guards.differences()

    def constants(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The graph's constants for a real step: those that Python found at a place are read there."""
        return tuple(self.feeds[i].read().to(old.device) if i in self.feeds else old for i, old in enumerate(captured))


def torch_settings() -> tuple[Any, ...]:
    """What is set for the whole process and changes what torch's functions make."""
    return torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()


def writes_in_place(name: str) -> bool:
    """Whether a function of torch, by its name, changes its first argument."""
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or name[2:-2] in _IN_PLACE
    return name.endswith("_")


def _plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _alike(one: Tensor, other: Any) -> bool:
    return (
        isinstance(other, Tensor)
        and (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())
        and not other.requires_grad
    )
