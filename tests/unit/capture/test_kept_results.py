"""What functions keep of a run that is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_autoparallel.capture.kept_results import KeptResults


def observed(function: Callable[[], Any]) -> tuple[KeptResults, list[str]]:
    """Calls ``function`` while its calls and returns are told; every call writes as often as ``written`` says."""
    kept, said = KeptResults(), []

    def event(frame: FrameType, what: str, argument: Any) -> None:
        if frame.f_code.co_filename != __file__:
            return
        if what == "call":
            kept.called(frame.f_code, len(written))
        elif what == "return":
            said.append(kept.returned(frame.f_code, argument, len(written)) or "")

    with FakeTensorMode():
        sys.setprofile(event)
        try:
            function()
        finally:
            sys.setprofile(None)
    return kept, [text for text in said if text]


written: list[int] = []


@lru_cache
def tensors(n: int) -> dict[str, Any]:
    return {"made": [torch.ones(n)]}


class Held:
    """Deep down, beside one that nobody made in the run."""

    given = torch.ones(1)

    def __init__(self) -> None:
        self.inner = {"table": (self.given, lambda: made)}
        made = torch.ones(2)


@cache
def holder() -> Held:
    return Held()


@cache
def single() -> object:
    return object()


@cache
def counts() -> int:
    written.append(1)
    return len(written)


named_otherwise = lru_cache(lambda n: torch.ones(n))


class Bound:
    """What is advised instead of a cache of the class."""

    def __init__(self) -> None:
        self.cached = lru_cache(self._made)

    def _made(self) -> torch.Tensor:
        return torch.ones(1)


bound = Bound()


@cache
def encoder() -> list[torch.Tensor]:
    return [Held.given]


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


@noted
@cache
def wrapped() -> torch.Tensor:
    return torch.ones(1)


class Model:
    @cache  # noqa: B019
    def method(self) -> torch.Tensor:
        return torch.ones(1)


@pytest.mark.parametrize(
    ("function", "keeper"),
    [
        (lambda: tensors(2), tensors),
        (lambda: holder(), holder),
        (lambda: wrapped(), wrapped.__wrapped__),
        (lambda: Model().method(), Model.method),
        (lambda: named_otherwise(2), named_otherwise),
        (lambda: bound.cached(), bound.cached),
    ],
    ids=["tensors", "holder", "wrapped", "method", "named otherwise", "bound"],
)
def test_tensors_of_a_run_are_not_kept(function: Callable[[], Any], keeper: Any) -> None:
    keeper.cache_clear()
    kept, said = observed(function)
    assert keeper.cache_info().currsize == 1
    assert said == []
    kept.forget()
    assert keeper.cache_info().currsize == 0


def test_functions_made_in_others() -> None:
    def make() -> Any:
        @cache
        def local() -> torch.Tensor:
            return torch.ones(1)

        return local

    first, second = make(), make()
    kept, _ = observed(lambda: (first(), second()))
    kept.forget()
    assert first.cache_info().currsize == second.cache_info().currsize == 0


def test_what_was_kept_before_stays() -> None:
    tensors.cache_clear()
    before = tensors(3)
    kept, _ = observed(lambda: tensors(3))
    kept.forget()
    assert tensors(3) is before


@pytest.mark.parametrize("function", [single, encoder], ids=["an object", "tensors of others"])
def test_what_holds_nothing_of_the_run_stays(function: Any) -> None:
    function.cache_clear()
    kept, _ = observed(function)
    kept.forget()
    assert function.cache_info().currsize == 1


def test_a_change_would_happen_at_each_step() -> None:
    counts.cache_clear()
    _, said = observed(lambda: counts())
    assert said == ["changes something in counts, whose results are kept (lru_cache): it would do so at each step"]
