"""Choices that are settled before the solver branches: never one that the best combination takes otherwise."""

from __future__ import annotations

import math

import highspy
import numpy as np
import pytest

from lightning_autoparallel.plan.integer_programme import GAP
from lightning_autoparallel.plan.probing import settle
from lightning_autoparallel.plan.programme import Programme
from tests.support.cost_tables import best_of_all
from tests.unit.plan.test_integer_programme import EVERY_WAY, problem, two_ways


def solver(programme: Programme) -> highspy.Highs:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.passModel(programme.model())
    return highs


@pytest.mark.parametrize(("overlaps", "limits"), EVERY_WAY)
@pytest.mark.parametrize("above", [1.0, 1.01])
def test_the_best_is_left(overlaps: int, limits: int, above: float) -> None:
    """By brute force, whether the best itself is known or one that takes more; the solver is as it was but for that."""
    fixed = 0
    for seed in range(100):
        given = problem(seed, overlaps, limits)
        best = best_of_all(given)
        if not math.isinf(best):
            programme = Programme(given)
            highs = solver(programme)
            fixed += settle(highs, programme, best * above, GAP, 60.0)
            highs.run()
            taken = programme.taken(np.asarray(highs.getSolution().col_value))
            assert given.time_us(taken) == pytest.approx(best, rel=1e-4), seed
    assert fixed > 1


def test_what_shares_leave_open_is_settled_by_what_is_known() -> None:
    """By hand: where 2 is known, the way that shows 3 is out, and so is every share of it."""
    given = two_ways()
    assert (given.time_us((0,)), given.time_us((1,))) == (2.0, 3.0)
    for known_us, settled in ((2.0, 1), (3.0, 0), (4.0, 0)):
        programme = Programme(given)
        assert settle(solver(programme), programme, known_us, GAP, 60.0) == settled


def test_nothing_is_settled_where_what_is_known_is_as_good_as_can_be() -> None:
    programme = Programme(problem(0, 0, 0))
    assert settle(solver(programme), programme, 0.0, GAP, 60.0) == 0
