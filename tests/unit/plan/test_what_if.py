"""What other alternatives would cost, against all combinations of small problems."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_autoparallel.plan.integer_programme import solve
from lightning_autoparallel.plan.problem import Choice, Limit, Problem, Reader, Value
from lightning_autoparallel.plan.what_if import OtherSolutions
from tests.support.cost_tables import added, tables
from tests.unit.plan.test_integer_programme import problem


@pytest.mark.parametrize("seed", [0, 2, 4, 6, 7, 10, 11])
def test_each_alternative_costs_what_the_best_combination_with_it_does(seed: int) -> None:
    given = problem(seed, overlaps=2, limits=0)
    costs = added(tables(given)).costs
    taken = solve(given, gap=1e-9).taken
    others = OtherSolutions(given, taken)
    for choice in range(3):
        for alternative in range(len(given.choices[choice].times_us)):
            found = others.with_fixed({choice: {alternative}})
            assert found is not None
            best = float(costs.take(alternative, axis=choice).min())
            assert found.more_us == pytest.approx(best - given.time_us(taken), abs=1e-5)
            assert bool(found.ruled_out) == math.isinf(best) == (found.taken is None)
            assert found.taken is None or found.taken[choice] == alternative


def small(moves_us: tuple[tuple[float, ...], ...], most_bytes: float) -> Problem:
    """A maker of one of two placements, which a reader wants in 0."""
    reader = Reader(choice=1, wants=(0,))
    value = Value(name="w.0", choice=0, made=(0, 1), readers=(reader,), moves_us=moves_us, texts=("R", "S(0)"))
    choices = (Choice(name="w", times_us=(1.0, 2.0)), Choice(name="r", times_us=(0.0,)))
    limit = Limit(name="what stays on a rank", sizes_bytes={0: (4.0, 8.0)}, most_bytes=most_bytes)
    return Problem(choices=choices, values=(value,), limits=(limit,))


def test_what_rules_out_is_named_without_solving() -> None:
    free = ((0.0, 1.0), (3.0, 0.0))
    others = OtherSolutions(small(free, 8.0), (0, 0))
    found = others.with_fixed({0: {1}})
    assert found is not None and (found.more_us, found.taken, others.asked) == (4.0, (1, 0), 1)
    limited = OtherSolutions(small(free, 7.0), (0, 0))
    assert limited.ruled_out({0: {1}}) == "limit: what stays on a rank would be at least 8 B of 7 B"
    blocked = OtherSolutions(small(((0.0, 1.0), (math.inf, 0.0)), 8.0), (0, 0))
    found = blocked.with_fixed({0: {1}})
    assert found is not None and found.ruled_out == "nothing leads from S(0) to R for w.0"
    assert limited.asked == blocked.asked == 0


@pytest.mark.parametrize(
    ("move_us", "never", "reason"),
    [
        (3.0, {(1, 0): "stays"}, ": stays"),
        (math.inf, {(1, 0): "stays"}, ": stays"),
        (math.inf, {(0, 0): "stays"}, ""),
    ],
)
def test_what_is_forbidden_says_why(move_us: float, never: dict[tuple[int, int], str], reason: str) -> None:
    given = small(((0.0, 1.0), (move_us, 0.0)), 8.0)
    (value,) = given.values
    readers = tuple(dataclasses.replace(reader, never=never) for reader in value.readers)
    problem = dataclasses.replace(given, values=(dataclasses.replace(value, readers=readers),))
    assert OtherSolutions(problem, (0, 0)).ruled_out({0: {1}}) == f"nothing leads from S(0) to R for w.0{reason}"


def test_no_more_is_solved_than_allowed() -> None:
    others = OtherSolutions(small(((0.0, 1.0), (3.0, 0.0)), 8.0), (0, 0), most_solves=1)
    assert others.with_fixed({0: {1}}) is not None
    assert others.is_spent and others.with_fixed({0: {1}}) is None
