"""Variables that functions of a step share with those in them: each run of the step has its own, whatever they hold."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_autoparallel.errors import CaptureError
from tests.unit.pipeline._steps import Net, Told, assert_equal, run_captured, run_plainly


class InALoop(Net):
    """A function is made in each turn, and a comprehension calls it."""

    def step(self, x, i):
        total = 0.0
        for k in range(3):

            def scaled(value, k=k):
                return value * (k + 1)

            total = total + sum([scaled(self.loss(x)) for _ in range(2)])
        return total


class OfALoop(Net):
    """What the comprehension reads is assigned again."""

    def step(self, x, i):
        total, size = 0.0, None
        for size in (1.0, 2.0):
            total = total + sum([self.loss(x) * size for _ in range(2)])
        size = 5.0
        return total * size


class Inside(Net):
    """By functions in functions."""

    def step(self, x, i):
        scale = 1.0

        def outer():
            def inner():
                return self.loss(x) * scale

            return inner()

        first = outer()
        scale = 3.0
        return first + outer()


def counter():
    count = 0

    def next_one():
        nonlocal count
        count += 1
        return float(count)

    return next_one


class Counts(Net):
    """By a function whose variable outlives the function around it."""

    def step(self, x, i):
        count = counter()
        return self.loss(x) * count() + count()


def around(factor):
    """What comes from outside of the step is no run's own."""

    class Outside(Net):
        def between(self, i):
            nonlocal factor
            factor = 2.0 if i >= 3 else 1.0

        def step(self, x, i):
            def inner():
                return self.loss(x) * factor

            return sum([inner() * factor for _ in range(2)])

    module, told = Outside(), Told()
    results = run_captured(copy.deepcopy(module), told)
    assert_equal(results, run_plainly(module))
    assert told.captures == 2


def scaled_by(factor, then=None):
    """Is run again with the same value, and calls what it has made before: whose variable is another one."""

    def scaled(value):
        return value * factor

    def assign(value):
        nonlocal factor
        factor = value

    scaled.assign = assign
    return scaled if then is None else scaled(then(1.0))


class OfAnEarlierCall(Net):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        object.__setattr__(self, "scaled", scaled_by(2.0))

    def between(self, i):
        if i == 3:
            self.scaled.assign(3.0)

    def step(self, x, i):
        return self.loss(x) * scaled_by(2.0, self.scaled)


def test_those_that_another_call_of_the_same_function_has_made_are() -> None:
    results = run_captured(OfAnEarlierCall(), told := Told())
    assert_equal(results, run_plainly(OfAnEarlierCall()))
    assert told.captures == 2


@pytest.mark.parametrize("kind", [InALoop, OfALoop, Inside])
def test_they_are_not_compared(kind: type[Net]) -> None:
    module, told = kind(), Told()
    results = run_captured(copy.deepcopy(module), told)
    assert_equal(results, run_plainly(module))
    assert told.captures == 1


def test_those_of_whoever_trains_are() -> None:
    around(1.0)


def test_a_number_that_each_run_keeps_in_a_place_of_its_own_ends_the_capture() -> None:
    with pytest.raises(CaptureError, match="in places that are new whenever it runs"):
        run_captured(Counts(), Told())
