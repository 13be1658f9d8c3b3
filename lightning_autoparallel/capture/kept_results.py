"""Results that functions keep (``functools.lru_cache``): tensors of a captured run are of that run only."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from lightning_autoparallel.capture.leaf_stand_ins import Unread
from lightning_autoparallel.capture.stand_ins import DictStandIn, ListStandIn
from lightning_autoparallel.capture.watch import Watched
from lightning_autoparallel.torch_compat.tracing import is_real

_Keeper = functools._lru_cache_wrapper
_STAND_INS = (ListStandIn, DictStandIn, Watched, Unread)
_LOOKED_AT = 4096  # objects that a result leads to


class KeptResults:
    """Functions that a run calls and that keep what they return."""

    def __init__(self) -> None:
        self._found: dict[CodeType, list[_Keeper[Any]]] | None = None
        self._kept: dict[int, _Keeper[Any]] = {}
        self._written: dict[CodeType, int] = {}

    @property
    def _keepers(self) -> dict[CodeType, list[_Keeper[Any]]]:
        """All that there are, by the code that they call; looked for once in a capture."""
        if self._found is None:
            self._found = {}
            for keeper in [found for found in gc.get_objects() if type(found) is _Keeper]:
                called = keeper.__wrapped__
                called = called.__func__ if isinstance(called, MethodType) else called
                if isinstance(called, FunctionType):
                    self._found.setdefault(called.__code__, []).append(keeper)
        return self._found

    def keeps(self, code: CodeType) -> bool:
        """Whether results of some function with this code are kept."""
        return code in self._keepers

    def called(self, code: CodeType, written: int) -> None:
        """A function is called; ``written`` is how many places the run has written so far."""
        if code in self._keepers:
            self._written[code] = written

    def returned(self, code: CodeType, result: Any, written: int) -> str | None:
        """A function returns; what is wrong with that, if anything: each real step calls it, Python only once."""
        keepers = self._keepers.get(code, [])
        if not keepers:
            return None
        if any(_is_of_a_run(held) for held in _reached(result)):
            self._kept |= {id(keeper): keeper for keeper in keepers}
        if written == self._written.get(code, written):
            return None
        return f"changes something in {code.co_name}, whose results are kept (lru_cache): it would do so at each step"

    def forget(self) -> None:
        """The run has ended: the next one, and real steps, call these functions again."""
        for keeper in self._kept.values():
            keeper.cache_clear()
        self._kept.clear()


def _is_of_a_run(value: Any) -> bool:
    return type(value) in _STAND_INS or (issubclass(type(value), Tensor) and not is_real(value))


def _reached(result: Any) -> Iterator[Any]:
    """What a result leads to, but for modules, classes and globals."""
    waiting, seen = [result], {id(result)}
    while waiting and len(seen) < _LOOKED_AT:
        value = waiting.pop()
        yield value
        if issubclass(type(value), (ModuleType, Tensor, type, *_STAND_INS)):
            continue
        held = (value.__closure__, value.__defaults__) if isinstance(value, FunctionType) else (value,)
        for other in gc.get_referents(*held):
            if id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
