"""Results that functions keep (``functools.lru_cache``): tensors of a captured run are of that run only."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from lightning_autoparallel.torch_compat.tree import tree_leaves

_Keeper = functools._lru_cache_wrapper


class KeptResults:
    """Functions of the user's that a run calls and that keep what they return."""

    def __init__(self) -> None:
        self._keepers: dict[CodeType, _Keeper[Any] | None] = {}
        self._kept: dict[int, _Keeper[Any]] = {}
        self._written: dict[CodeType, int] = {}

    def meet(self, frame: FrameType) -> None:
        """A function is called for the first time in this run."""
        if frame.f_code not in self._keepers:
            self._keepers[frame.f_code] = _keeper_of(frame)

    def called(self, code: CodeType, written: int) -> None:
        """A function is called; ``written`` is how many places the run has written so far."""
        if self._keepers.get(code) is not None:
            self._written[code] = written

    def returned(self, code: CodeType, result: Any, written: int) -> str | None:
        """A function returns; what is wrong with that, if anything: each real step calls it, Python only once."""
        keeper = self._keepers.get(code)
        if keeper is None:
            return None
        if any(_has_tensors(leaf) for leaf in tree_leaves(result)):
            self._kept[id(keeper)] = keeper
        if written == self._written.get(code, written):
            return None
        return f"changes something in {code.co_name}, whose results are kept (lru_cache): it would do so at each step"

    def forget(self) -> None:
        """The run has ended: the next one, and real steps, call these functions again."""
        for keeper in self._kept.values():
            keeper.cache_clear()
        self._kept.clear()


def _keeper_of(frame: FrameType) -> _Keeper[Any] | None:
    """What keeps the results of the function that runs in ``frame``."""
    code = frame.f_code
    for found in _under_its_name(frame):
        while found is not None:
            if isinstance(found, _Keeper) and getattr(found.__wrapped__, "__code__", None) is code:
                return found
            found = getattr(found, "__wrapped__", getattr(found, "__func__", getattr(found, "fget", None)))
    if "<locals>" not in code.co_qualname:
        return None
    functions = [found for found in gc.get_referrers(code) if getattr(found, "__code__", None) is code]
    return next((found for found in gc.get_referrers(*functions) if isinstance(found, _Keeper)), None)


def _under_its_name(frame: FrameType) -> Iterator[Any]:
    """What the module of a function, or a class of it, has under the function's name."""
    first, *others = frame.f_code.co_qualname.split(".")
    found = frame.f_globals.get(first)
    for name in others:
        found = vars(found).get(name) if isinstance(found, type) else None
    if found is not None:
        yield found


def _has_tensors(value: Any) -> bool:
    return any(isinstance(held, Tensor) for held in (value, *getattr(value, "__dict__", {}).values()))
