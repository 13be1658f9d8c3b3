"""Stand-ins for numbers that change from step to step: what the step decides by them is noted, the rest is computed.

``Watched`` keeps its arithmetic as an expression, evaluated again at every real step. A comparison or a conversion is a
decision: a guard. A tensor that is computed with one makes it an input of the graph (``fed``).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_autoparallel.capture.places import Place
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError

Evaluate = Callable[[Mapping[str, Any]], Any]
MOST_EXACT = 3  # variants that are told apart by a number itself
_AHEAD, _COUNTED = 8, ("batch_idx", "global_step")  # steps to come, of which these numbers are known
MOST_FED = 32  # numbers that one step's graph takes


class StartOver(BaseException):
    """The capture has learned what it must begin with; no ``except`` of the step may hold it."""


class NeedsVector(StartOver):
    """The step computes with a number and a tensor: its graph needs an input for numbers."""


class NeedsClones(StartOver):
    """The step changes tensors of the batch in place, at these positions."""

    def __init__(self, positions: frozenset[int]) -> None:
        super().__init__()
        self.positions = positions


class NeedsNumbers(StartOver):
    """The step reads and writes numbers, of which each step finds another: they are ``places``, by identity."""

    def __init__(self, places: frozenset[Any]) -> None:
        super().__init__()
        self.places = places


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A Python decision of the step: ``evaluate`` on a real step's counters must give ``outcome`` again.

    ``exact`` ones use the number itself: every other value is another variant.
    """

    text: str
    source: str
    evaluate: Evaluate
    outcome: Any
    exact: bool = False

    def holds(self, counters: Mapping[str, Any]) -> bool:
        """Whether the captured branch is the one that these counters take."""
        return bool(self.evaluate(counters) == self.outcome)


def exact_repeats(variants: Iterable[Iterable[Guard]]) -> Guard | None:
    """A guard on a number itself of which three variants have an outcome each: nearly every step has another."""
    outcomes: dict[tuple[str, str], list[Any]] = {}
    for guards in variants:
        for guard in guards:
            seen = outcomes.setdefault((guard.text, guard.source), [])
            if guard.exact and guard.outcome not in seen:
                seen.append(guard.outcome)
                if len(seen) == MOST_EXACT:
                    return guard
    return None


class Watcher:
    """Collects the guards of one capture of the step; ``counters`` are the values that it sees.

    ``places`` says where real steps read numbers that are no counters. ``vector`` is the graph's input for ``fed``
    numbers, while the step runs and if it has one.
    """

    def __init__(self, counters: Mapping[str, Any]) -> None:
        self.counters = dict(counters)
        self.places: dict[str, Place] = {}
        self._guards: dict[tuple[str, str], Guard] = {}
        self.fed: dict[str, Watched] = {}
        self.vector: Tensor | None = None
        self.uses = 0
        self.in_backward = False  # a backward of the user's runs
        self.refusal: CaptureError | None = None

    def refuse(self, message: str) -> CaptureError:
        """The error to raise; it is raised again after the run, should the step hold it."""
        self.refusal = self.refusal or CaptureError(message)
        return self.refusal

    def value(self, name: str) -> Watched:
        """The stand-in for one counter."""
        return Watched(self, name, lambda counters: counters[name])

    def at_place(self, place: Place, value: Any) -> Watched:
        """The stand-in for the number that was found there."""
        if self.in_backward:
            raise self.refuse(
                f"{user_line()} reads {place.text} when the backward runs, where a number cannot be an input: keep "
                "it in ctx in the forward"
            )
        known = [name for name, other in self.places.items() if other.identity == place.identity]
        name = known[0] if known else _unique(place.text, self.counters)
        self.places[name] = place
        self.counters[name] = value
        return self.value(name)

    def start(self) -> None:
        """A run of the step begins; what earlier ones decided and fed is kept, as all runs are of one step."""
        self.uses = 0

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What a run inside decides, feeds and refuses is not kept."""
        guards, fed, refusal = dict(self._guards), dict(self.fed), self.refusal
        try:
            yield
        finally:
            self._guards, self.fed, self.refusal = guards, fed, refusal

    def forget(self) -> None:
        """The capture starts over."""
        self._guards.clear()
        self.fed.clear()

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The decisions, each once."""
        return tuple(self._guards.values())

    def decide(self, text: str, evaluate: Evaluate, exact: bool = False) -> Any:
        """The outcome now, noted as a guard with the user's line."""
        outcome, source = evaluate(self.counters), user_line()
        if exact and self._changes_soon(evaluate):
            raise self.refuse(f"{source} decides by `{text}` differently at nearly every step; compute it on tensors")
        self._guards[(text, source)] = Guard(text=text, source=source, evaluate=evaluate, outcome=outcome, exact=exact)
        return outcome

    def _changes_soon(self, evaluate: Evaluate) -> bool:
        """Whether the next steps will each decide otherwise, so that a graph for each would be in vain."""
        outcomes: list[Any] = []
        for step in range(_AHEAD):
            later = {name: self.counters[name] + step for name in _COUNTED if name in self.counters}
            with contextlib.suppress(ArithmeticError, ValueError, LookupError, TypeError):
                outcome = evaluate({**self.counters, **later})
                outcomes += [outcome] if outcome not in outcomes else []
        return len(outcomes) > MOST_EXACT

    def feed(self, number: Watched) -> Tensor:
        """The graph's input for a number: float64, without dims.

        Raises:
            NeedsVector: the graph has no such input yet.
            CaptureError: the step feeds more numbers than that input holds.
        """
        self.uses += 1
        if self.vector is None:
            raise NeedsVector
        self.fed.setdefault(number._text, number)
        if len(self.fed) > MOST_FED:
            raise CaptureError(
                f"{user_line()} computes with more than {MOST_FED} numbers of a step and tensors; put them into one "
                "tensor of the batch"
            )
        return self.vector[list(self.fed).index(number._text)]

    def numbers(self, counters: Mapping[str, Any]) -> list[float]:
        """What a real step feeds."""
        fed = [float(number._evaluate(counters)) for number in self.fed.values()]
        return fed + [0.0] * (MOST_FED - len(fed))


def _unique(text: str, taken: Iterable[str]) -> str:
    names = set(taken)
    return next(name for name in (text, *(f"{text} ({i})" for i in range(2, len(names) + 3))) if name not in names)


class Watched:
    """A number whose arithmetic stays watched and whose comparisons and conversions are decisions.

    It is no ``int`` on purpose: torch would otherwise bake its value into the graph unnoticed. It says that it is one
    to ``isinstance``.
    """

    def __init__(self, watcher: Watcher, text: str, evaluate: Evaluate) -> None:
        self._watcher, self._text, self._evaluate = watcher, text, evaluate

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._now())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Without a capture around, torch is given the number."""
        plain = {name: exact_value(value) for name, value in (kwargs or {}).items()}
        return function(*(exact_value(value) for value in args), **plain)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options or any(isinstance(value, np.ndarray) for value in inputs):
            return getattr(function, method)(*map(exact_value, inputs), **options)
        return _applied(self._watcher, function.__name__, function, inputs)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.asarray(exact_value(self), *args, **options)

    def _now(self) -> Any:
        return self._evaluate(self._watcher.counters)

    def _decided(self, text: str, convert: Callable[[Any], Any], exact: bool = True) -> Any:
        return self._watcher.decide(text, lambda counters: convert(self._evaluate(counters)), exact)

    def __bool__(self) -> bool:
        return bool(self._decided(f"bool({self._text})", bool, exact=False))

    def __int__(self) -> int:
        return int(self._decided(f"int({self._text})", int))

    def __index__(self) -> int:
        return int(self._decided(self._text, operator.index))

    def __float__(self) -> float:
        return float(self._decided(f"float({self._text})", float))

    def __complex__(self) -> complex:
        return complex(self._decided(f"complex({self._text})", complex))

    def __hash__(self) -> int:
        return int(self._decided(f"hash({self._text})", hash))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(exact_value(self), name)

    def __reduce__(self) -> Any:
        return (type(self._now()), (exact_value(self),))

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: Any) -> Watched:
        return self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __round__(self, digits: int | None = None) -> Watched:
        return _applied(self._watcher, "round", round, (self,) if digits is None else (self, digits))

    def __format__(self, spec: str) -> str:
        return str(self._decided(f"text of {self._text}", lambda number: format(number, spec)))

    __str__ = __repr__ = lambda self: format(self, "")


def is_watched(value: Any) -> bool:
    """Whether a value is a stand-in for a number."""
    return type(value) is Watched


def exact_value(value: Any) -> Any:
    """The number that a stand-in stands for, as a decision; anything else as it is."""
    if type(value) is not Watched:
        return value
    return value._decided(f"{value._text}", lambda number: number)


def evaluated(value: Any, counters: Mapping[str, Any]) -> Any:
    """The number at a real step that a stand-in stands for; anything else as it is."""
    return value._evaluate(counters) if type(value) is Watched else value


def _applied(watcher: Watcher, name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Watched:
    text = f"{name}({', '.join(str(_text(value)) for value in inputs)})"
    return Watched(watcher, text, lambda counters: function(*(evaluated(value, counters) for value in inputs)))


def _text(value: Any) -> Any:
    return value._text if type(value) is Watched else repr(value)


def symbolic(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of numbers, kept as an expression where it is given a stand-in."""

    def call(*args: Any, **kwargs: Any) -> Any:
        watched = [value for value in args if type(value) is Watched]
        if not watched or kwargs:
            return function(*args, **kwargs)
        return _applied(watched[0]._watcher, name, function, args)

    return call


def math_functions() -> dict[str, Callable[..., Any]]:
    """Those of ``math`` that take and give numbers, by name."""
    return {
        name: function
        for name, function in vars(math).items()
        if callable(function) and name not in ("fsum", "prod", "dist", "frexp", "modf", "sumprod") and name[0] != "_"
    }


def _combine(symbol: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Watched, Any], Any]:
    def method(self: Watched, other: Any) -> Any:
        if not isinstance(other, (bool, int, float, complex, np.generic)):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        text = f"({_text(left)} {symbol} {_text(right)})"
        return Watched(
            self._watcher, text, lambda counters: function(evaluated(left, counters), evaluated(right, counters))
        )

    return method


def _alone(symbol: str, function: Callable[[Any], Any]) -> Callable[[Watched], Watched]:
    def method(self: Watched) -> Watched:
        return Watched(self._watcher, f"{symbol}({self._text})", lambda counters: function(self._evaluate(counters)))

    return method


def _compare(symbol: str, function: Callable[[Any, Any], bool]) -> Callable[[Watched, Any], bool]:
    def method(self: Watched, other: Any) -> bool:
        if isinstance(other, (Tensor, np.ndarray)):
            return NotImplemented
        text = f"{self._text} {symbol} {_text(other)}"
        return bool(
            self._watcher.decide(text, lambda counters: function(self._evaluate(counters), evaluated(other, counters)))
        )

    return method


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_ARITHMETIC |= {"lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ALONE: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
}
_ALONE |= {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
for _name, _symbol in _ARITHMETIC.items():
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Watched, f"__{_name}__", _combine(_symbol, _function, reflected=False))
    setattr(Watched, f"__r{_name}__", _combine(_symbol, _function, reflected=True))
for _name, _symbol in _COMPARISONS.items():
    setattr(Watched, f"__{_name}__", _compare(_symbol, getattr(operator, _name)))
for _name, _one in _ALONE.items():
    setattr(Watched, f"__{_name}__", _alone(_name, _one))
