"""Stand-ins for ``batch_idx``, ``global_step`` and ``current_epoch`` that notice what the step decides by them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError

Evaluate = Callable[[Mapping[str, int]], Any]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A Python decision of the step: ``evaluate`` on a real step's counters must give ``outcome`` again."""

    text: str
    source: str
    evaluate: Evaluate
    outcome: Any

    def holds(self, counters: Mapping[str, int]) -> bool:
        """Whether the captured branch is the one that these counters take."""
        return bool(self.evaluate(counters) == self.outcome)


class Watcher:
    """Collects the guards of one run of the step; ``counters`` are the values that this run sees."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        self.counters = dict(counters)
        self._guards: dict[tuple[str, str], Guard] = {}
        self.formatted_at: set[str] = set()

    def value(self, name: str) -> Watched:
        """The stand-in for one counter."""
        return Watched(self, name, lambda counters: counters[name])

    def start(self) -> None:
        """Forget what an earlier run of the same step decided."""
        self._guards.clear()
        self.formatted_at.clear()

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The decisions of the last run, each once."""
        return tuple(self._guards.values())

    def decide(self, text: str, evaluate: Evaluate) -> Any:
        """The outcome now, noted as a guard with the user's line."""
        outcome, source = evaluate(self.counters), user_line()
        self._guards[(text, source)] = Guard(text=text, source=source, evaluate=evaluate, outcome=outcome)
        return outcome


class Watched:
    """A number whose arithmetic stays watched and whose comparisons and conversions are decisions.

    It is no ``int`` on purpose: torch would otherwise bake its value into the graph unnoticed.
    """

    def __init__(self, watcher: Watcher, text: str, evaluate: Evaluate) -> None:
        self._watcher, self._text, self._evaluate = watcher, text, evaluate

    def _decided(self, text: str, convert: Callable[[Any], Any]) -> Any:
        return self._watcher.decide(text, lambda counters: convert(self._evaluate(counters)))

    def __bool__(self) -> bool:
        return bool(self._decided(f"bool({self._text})", bool))

    def __int__(self) -> int:
        return int(self._decided(f"int({self._text})", int))

    def __index__(self) -> int:
        return int(self._decided(self._text, operator.index))

    def __float__(self) -> float:
        return float(self._decided(f"float({self._text})", float))

    def __hash__(self) -> int:
        return int(self._decided(f"hash({self._text})", hash))

    def __format__(self, spec: str) -> str:
        self._watcher.formatted_at.add(user_line())
        return format(self._evaluate(self._watcher.counters), spec)

    __str__ = __repr__ = lambda self: format(self, "")


def _plain(value: Any, counters: Mapping[str, int]) -> Any:
    return value._evaluate(counters) if isinstance(value, Watched) else value


def _combine(symbol: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Watched, Any], Watched]:
    def method(self: Watched, other: Any) -> Watched:
        if isinstance(other, Tensor):
            raise CaptureError(
                f"{user_line()} computes with {self._text} and a tensor: the graph would keep the value of one step; "
                "put the number into the batch, or keep it as a buffer that the step changes"
            )
        left, right = (other, self) if reflected else (self, other)
        text = f"{getattr(left, '_text', left)} {symbol} {getattr(right, '_text', right)}"
        return Watched(
            self._watcher, f"({text})", lambda counters: function(_plain(left, counters), _plain(right, counters))
        )

    return method


def _compare(symbol: str, function: Callable[[Any, Any], bool]) -> Callable[[Watched, Any], bool]:
    def method(self: Watched, other: Any) -> bool:
        text = f"{self._text} {symbol} {getattr(other, '_text', other)}"
        return bool(
            self._watcher.decide(text, lambda counters: function(self._evaluate(counters), _plain(other, counters)))
        )

    return method


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _symbol in _ARITHMETIC.items():
    setattr(Watched, f"__{_name}__", _combine(_symbol, getattr(operator, _name), reflected=False))
    setattr(Watched, f"__r{_name}__", _combine(_symbol, getattr(operator, _name), reflected=True))
for _name, _symbol in _COMPARISONS.items():
    setattr(Watched, f"__{_name}__", _compare(_symbol, getattr(operator, _name)))
