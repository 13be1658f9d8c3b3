"""Counters that a step reads: what it decides by them is noted with its line and decided again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.errors import CaptureError

HERE = Path(__file__).name


def line() -> int:
    return sys._getframe(1).f_lineno


def test_a_comparison_is_a_guard_with_its_line():
    watcher = Watcher({"batch_idx": 4})
    assert watcher.value("batch_idx") > 3
    (guard,) = watcher.guards
    assert (guard.text, guard.source, guard.outcome) == ("batch_idx > 3", f"{HERE}:{line() - 2}", True)
    assert guard.holds({"batch_idx": 10})
    assert not guard.holds({"batch_idx": 3})


@pytest.mark.parametrize(
    ("text", "decide"),
    [
        ("(count % 2) == 0", lambda i: i % 2 == 0),
        ("((count * 3) + 1) >= 10", lambda i: i * 3 + 1 >= 10),
        ("(10 - count) < 5", lambda i: 10 - i < 5),
        ("(2 ** count) != 8", lambda i: 2**i != 8),
        ("(count // 4) <= 0", lambda i: i // 4 <= 0),
        ("(12 / count) == 4.0", lambda i: 12 / i == 4.0),
        ("count > 3", lambda i: i > 3),
        ("bool(count)", lambda i: bool(i)),
        ("int(count)", lambda i: int(i) == 3),
        ("float(count)", lambda i: float(i) == 3.0),
        ("count", lambda i: list(range(20))[i] == 3),
        ("hash(count)", lambda i: i in {3: "three"}),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_decisions_are_those_of_an_integer(text: str, decide):
    """The captured outcome, and whether the guard holds, for every number that a real step may bring."""
    for captured in range(1, 12):
        watcher = Watcher({"count": captured})
        assert decide(watcher.value("count")) == decide(captured)
        guards = watcher.guards
        assert text in [guard.text for guard in guards]
        for real in range(1, 12):
            if all(guard.holds({"count": real}) for guard in guards):
                assert decide(real) == decide(captured)
        assert all(guard.holds({"count": captured}) for guard in guards)


def test_two_counters_together():
    watcher = Watcher({"step": 4, "epoch": 1})
    assert not watcher.value("step") < watcher.value("epoch") * 2
    (guard,) = watcher.guards
    assert guard.text == "step < (epoch * 2)"
    assert guard.holds({"step": 9, "epoch": 4}) and not guard.holds({"step": 7, "epoch": 4})


def test_arithmetic_alone_decides_nothing():
    watcher = Watcher({"i": 4})
    _ = (watcher.value("i") + 1) % 3
    assert watcher.guards == ()


def test_the_same_decision_is_kept_once():
    watcher = Watcher({"i": 4})
    for _ in range(3):
        assert watcher.value("i") == 4
    assert len(watcher.guards) == 1


def test_a_capture_that_starts_over_forgets_the_old_one():
    watcher = Watcher({"i": 4})
    assert watcher.value("i") == 4
    watcher.forget()
    assert watcher.guards == ()


@pytest.mark.parametrize(
    "compute",
    [lambda i, t: i * t, lambda i, t: t * i, lambda i, t: i - t, lambda i, t: t / i, lambda i, t: (i + 1) * t],
)
def test_without_a_capture_torch_is_given_the_number(compute):
    """Which is a decision on it."""
    watcher = Watcher({"step": 4})
    torch.testing.assert_close(compute(watcher.value("step"), torch.ones(2)), compute(4, torch.ones(2)))
    (guard,) = watcher.guards
    assert guard.exact and not guard.holds({"step": 5})


def test_it_says_that_it_is_a_number():
    watcher = Watcher({"i": 4})
    assert isinstance(watcher.value("i"), int) and isinstance(watcher.value("i") / 2, float)
    assert watcher.guards == ()


@pytest.mark.parametrize("show", [str, repr, "{:03d}".format, "{}".format])
def test_a_text_of_a_number_is_a_decision(show):
    """Nothing could make it again at a real step."""
    watcher = Watcher({"i": 4, "batch_idx": 0})
    assert show(watcher.value("i") + 1) == show(5)
    (guard,) = watcher.guards
    assert guard.exact and not guard.holds({"i": 5}) and guard.holds({"i": 4})
    with pytest.raises(CaptureError, match=rf"{HERE}:\d+ decides by `text of batch_idx` differently at nearly every"):
        show(watcher.value("batch_idx"))


def test_a_decision_that_each_step_takes_otherwise_is_refused_at_once():
    watcher = Watcher({"batch_idx": 0, "i": 0})
    assert int(watcher.value("batch_idx") % 3) == 0 and int(watcher.value("i")) == 0
    with pytest.raises(CaptureError, match=r"decides by `int\(\(batch_idx % 4\)\)` differently at nearly every step"):
        int(watcher.value("batch_idx") % 4)
