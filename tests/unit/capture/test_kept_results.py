"""What functions keep of a run that is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from types import FrameType
from typing import Any

import pytest
import torch

from lightning_autoparallel.capture.kept_results import KeptResults


def observed(function: Callable[[], Any]) -> tuple[KeptResults, list[str]]:
    """Calls ``function`` while its calls and returns are told; every call writes as often as ``written`` says."""
    kept, said = KeptResults(), []

    def event(frame: FrameType, what: str, argument: Any) -> None:
        if frame.f_code.co_filename != __file__:
            return
        if what == "call":
            kept.meet(frame)
            kept.called(frame.f_code, len(written))
        elif what == "return":
            said.append(kept.returned(frame.f_code, argument, len(written)) or "")

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
    def __init__(self) -> None:
        self.table = torch.ones(2)


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
    ],
    ids=["tensors", "holder", "wrapped", "method"],
)
def test_tensors_of_a_run_are_not_kept(function: Callable[[], Any], keeper: Any) -> None:
    keeper.cache_clear()
    kept, said = observed(function)
    assert keeper.cache_info().currsize == 1
    assert said == []
    kept.forget()
    assert keeper.cache_info().currsize == 0


def test_functions_made_in_others() -> None:
    @cache
    def local() -> torch.Tensor:
        return torch.ones(1)

    kept, _ = observed(local)
    kept.forget()
    assert local.cache_info().currsize == 0


def test_what_was_kept_before_stays() -> None:
    tensors.cache_clear()
    before = tensors(3)
    kept, _ = observed(lambda: tensors(3))
    kept.forget()
    assert tensors(3) is before


def test_what_holds_no_tensors_stays() -> None:
    single.cache_clear()
    kept, _ = observed(single)
    kept.forget()
    assert single.cache_info().currsize == 1


def test_a_change_would_happen_at_each_step() -> None:
    counts.cache_clear()
    _, said = observed(lambda: counts())
    assert said == ["changes something in counts, whose results are kept (lru_cache): it would do so at each step"]
