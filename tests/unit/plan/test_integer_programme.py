"""The planner's problem, solved: equal to trying every combination, with values that are shared and with overlaps."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.plan.integer_programme import GAP, solve
from lightning_autoparallel.plan.problem import Choice, Overlap, Problem, Reader, Value

CHOICES, PLACEMENTS = 9, 3


def choice(dice: random.Random, number: int) -> Choice:
    times = [dice.choice([0.0, 1.0, 2.5, 5.0]) for _ in range(dice.randint(1, 3))]
    if len(times) > 1 and dice.random() < 0.1:
        times[-1] = math.inf
    return Choice(name=str(number), times_us=tuple(times))


def value(dice: random.Random, number: int, choices: list[Choice]) -> Value:
    """Read by one to three choices, perhaps by the one that makes it: equal blocks read themselves."""

    def placed(owner: int) -> tuple[int, ...]:
        return tuple(dice.randrange(PLACEMENTS) for _ in choices[owner].times_us)

    readers = []
    for _ in range(dice.randint(1, 3)):
        owner = dice.randrange(CHOICES)
        never = {(dice.randrange(PLACEMENTS), dice.randrange(PLACEMENTS))} if dice.random() < 0.15 else set()
        readers.append(Reader(choice=owner, wants=placed(owner), never=frozenset(never)))
    moves = tuple(
        tuple(0.0 if s == t else dice.choice([1.0, 2.0, 4.0, 4.0, math.inf]) for t in range(PLACEMENTS))
        for s in range(PLACEMENTS)
    )
    return Value(name=str(number), choice=number, made=placed(number), readers=tuple(readers), moves_us=moves)


def overlap(dice: random.Random, choices: list[Choice]) -> Overlap:
    def times() -> dict[int, tuple[float, ...]]:
        chosen = dice.sample(range(CHOICES), 4)
        return {number: tuple(dice.uniform(0, 3) for _ in choices[number].times_us) for number in chosen}

    return Overlap(name="part", sent_us=times(), computed_us=times())


def problem(seed: int, overlaps: int) -> Problem:
    dice = random.Random(seed)
    choices = [choice(dice, number) for number in range(CHOICES)]
    values = [value(dice, number, choices) for number in range(CHOICES) if dice.random() < 0.6]
    parts = [overlap(dice, choices) for _ in range(overlaps)]
    return Problem(choices=tuple(choices), values=tuple(values), overlaps=tuple(parts))


def by_hand(given: Problem) -> float:
    return min(given.time_us(taken) for taken in itertools.product(*(range(len(c.times_us)) for c in given.choices)))


@pytest.mark.parametrize("overlaps", [0, 2])
def test_as_good_as_the_best_of_all_combinations(overlaps: int) -> None:
    possible = 0
    for seed in range(150):
        given = problem(seed, overlaps)
        best = by_hand(given)
        if math.isinf(best):
            with pytest.raises(InfeasiblePlanError, match=r"no plan was found for 9 choices: HiGHS says 'Infeasible'"):
                solve(given)
            continue
        possible += 1
        found = solve(given)
        assert found.time_us == pytest.approx(given.time_us(found.taken))
        assert best <= found.time_us + 1e-9 <= best * (1 + GAP) + 1e-6, seed
        assert found.bound_us <= best + 1e-6, seed
    assert 50 < possible < 150


def test_a_value_that_two_want_is_moved_once() -> None:
    """By hand: both readers want placement 1 (cost 3 once), or one of them computes for 2 more."""
    readers = tuple(Reader(choice=number, wants=(1, 0)) for number in (1, 2))
    moved = Value(name="v", choice=0, made=(0,), readers=readers, moves_us=((0.0, 3.0), (math.inf, 0.0)))
    maker, reader = Choice(name="m", times_us=(1.0,)), Choice(name="r", times_us=(0.0, 2.0))
    found = solve(Problem(choices=(maker, reader, reader), values=(moved,)))
    assert (found.taken, found.time_us) == ((0, 0, 0), 4.0)


def test_what_computing_hides_costs_nothing() -> None:
    """By hand: sending 5 beside computing 4 costs 1, less than the alternative's 2 more of computing."""
    computes = Choice(name="c", times_us=(4.0, 6.0))
    hidden = Overlap(name="o", sent_us={0: (5.0, 0.0)}, computed_us={0: (4.0, 6.0)})
    found = solve(Problem(choices=(computes,), values=(), overlaps=(hidden,)))
    assert (found.taken, found.time_us) == ((0,), 5.0)
    assert Problem(choices=(computes,), values=(), overlaps=(hidden,)).time_us((1,)) == 6.0
