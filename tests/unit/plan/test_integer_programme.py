"""The planner's problem, solved: equal to trying every combination, shared values, overlaps and limits included."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_autoparallel.errors import InfeasiblePlanError, SearchTimeError
from lightning_autoparallel.plan import integer_programme
from lightning_autoparallel.plan.integer_programme import GAP, solve
from lightning_autoparallel.plan.problem import Choice, Limit, Overlap, Problem, Reader, Value, priced, unlimited
from tests.support.cost_tables import added, best_of_all, tables
from tests.support.variable_elimination import least_of_all

CHOICES, PLACEMENTS = 12, 3
ALTERNATIVES = [2] * 6 + [3] * 4 + [4] * 2
EVERY_WAY = [(overlaps, limits) for overlaps in (0, 2) for limits in (0, 2)]


def choice(dice: random.Random, number: int, count: int) -> Choice:
    times = [dice.choice([0.0, 1.0, 2.5, 5.0]) for _ in range(count)]
    if dice.random() < 0.1:
        times[-1] = math.inf
    return Choice(name=str(number), times_us=tuple(times))


def value(dice: random.Random, number: int, choices: list[Choice]) -> Value:
    """Read by one to four choices, perhaps by the one that makes it: equal blocks read themselves."""

    def placed(owner: int) -> tuple[int, ...]:
        return tuple(dice.randrange(PLACEMENTS) for _ in choices[owner].times_us)

    readers = []
    for _ in range(dice.randint(1, 4)):
        owner = dice.randrange(CHOICES)
        never = {(dice.randrange(PLACEMENTS), dice.randrange(PLACEMENTS))} if dice.random() < 0.15 else set()
        readers.append(Reader(choice=owner, wants=placed(owner), never=dict.fromkeys(never, "ruled out")))
    moves = tuple(
        tuple(0.0 if s == t else dice.choice([1.0, 2.0, 2.0, 4.0, 4.0, 4.0, math.inf]) for t in range(PLACEMENTS))
        for s in range(PLACEMENTS)
    )
    return Value(name=str(number), choice=number, made=placed(number), readers=tuple(readers), moves_us=moves)


def overlap(dice: random.Random, choices: list[Choice], values: list[Value]) -> Overlap:
    def times() -> dict[int, tuple[float, ...]]:
        chosen = dice.sample(range(CHOICES), 4)
        return {number: tuple(dice.uniform(0, 3) for _ in choices[number].times_us) for number in chosen}

    moves = dice.sample(range(len(values)), min(len(values), dice.randrange(3)))
    return Overlap(
        name="part", sent_us=times(), computed_us=times(), moves={number: dice.choice([0.5, 1.0]) for number in moves}
    )


def limit(dice: random.Random, choices: list[Choice]) -> Limit:
    """Whole bytes, so that what just fits does so exactly; sometimes there is no room however they lie."""

    def sizes(count: int) -> dict[int, tuple[float, ...]]:
        chosen = dice.sample(range(CHOICES), count)
        return {number: tuple(float(dice.randrange(10)) for _ in choices[number].times_us) for number in chosen}

    passing = tuple(sizes(2) for _ in range(dice.randrange(3)))
    most = float(dice.randint(16, 34) + 8 * bool(passing))
    return Limit(name="room", sizes_bytes=sizes(8), most_bytes=most, passing_bytes=passing)


def problem(seed: int, overlaps: int, limits: int) -> Problem:
    dice = random.Random(seed)
    counts = dice.sample(ALTERNATIVES, CHOICES)
    choices = [choice(dice, number, count) for number, count in enumerate(counts)]
    values = [value(dice, number, choices) for number in range(CHOICES) if dice.random() < 0.6]
    parts = [overlap(dice, choices, values) for _ in range(overlaps)]
    rooms = [limit(dice, choices) for _ in range(limits)]
    return Problem(choices=tuple(choices), values=tuple(values), overlaps=tuple(parts), limits=tuple(rooms))


@pytest.mark.parametrize(("overlaps", "limits"), EVERY_WAY)
def test_as_good_as_the_best_of_all_combinations(overlaps: int, limits: int) -> None:
    possible, short = 0, 0
    for seed in range(150):
        given = problem(seed, overlaps, limits)
        best = best_of_all(given)
        if math.isinf(best):
            with pytest.raises(InfeasiblePlanError, match=r"no plan was found for 12 choices: HiGHS says 'Infeasible'"):
                solve(given)
            short += not math.isinf(best_of_all(replace(given, limits=())))
            continue
        possible += 1
        found = solve(given)
        assert given.fits(found.taken)
        assert found.time_us == pytest.approx(given.time_us(found.taken))
        assert best <= found.time_us + 1e-9 <= best * (1 + GAP) + 1e-6, seed
        assert found.bound_us <= best + 1e-6, seed
    assert 30 < possible < 150
    assert (short > 5) == bool(limits), "some problems have no room, and nothing else against them"


@pytest.mark.parametrize("has_room", [False, True])
def test_what_stays_and_passes_has_its_price(has_room: bool) -> None:
    """Of all that is alive at once, and so the largest of what passes: with or without a limit to it."""
    dearer = 0
    for seed in range(100):
        given = problem(seed, 1, 1)
        given = priced(unlimited(given) if has_room else given, 0.5)
        if math.isinf(best := best_of_all(given)):
            continue
        found = solve(given)
        assert best <= given.time_us(found.taken) + 1e-9 <= best * (1 + GAP) + 1e-6, seed
        dearer += best_of_all(priced(given, 0.0)) < priced(given, 0.0).time_us(found.taken) - 1e-6
    assert dearer > 10, "time alone decides"


@pytest.mark.parametrize(("overlaps", "limits"), EVERY_WAY)
def test_tables_hold_what_a_problem_costs(overlaps: int, limits: int) -> None:
    """What brute force adds up is what the problem says of a combination, wherever one is taken."""
    dice = random.Random(0)
    for seed in range(20):
        given = problem(seed, overlaps, limits)
        everything = added(tables(given)).costs
        for _ in range(50):
            taken = tuple(dice.randrange(len(c.times_us)) for c in given.choices)
            costs = given.time_us(taken) if given.fits(taken) else math.inf
            assert everything[taken] == pytest.approx(costs), (seed, taken)


@pytest.mark.parametrize(("overlaps", "limits"), EVERY_WAY)
def test_elimination_finds_the_least_of_all_combinations(overlaps: int, limits: int) -> None:
    """What larger problems are compared with, where not every combination can be tried."""
    for seed in range(40):
        given = problem(seed, overlaps, limits)
        assert least_of_all(given).time_us == pytest.approx(best_of_all(given)), seed


def test_no_combination_has_room() -> None:
    """By hand: two of 5 or 3 bytes each, the smaller slower; what fills the room exactly fits."""
    one = Choice(name="c", times_us=(1.0, 3.0))
    sizes = {0: (5.0, 3.0), 1: (5.0, 3.0)}
    for most, taken in ((10.0, (0, 0)), (8.0, (0, 1)), (6.0, (1, 1)), (5.0, None)):
        given = Problem(choices=(one, one), values=(), limits=(Limit(name="l", sizes_bytes=sizes, most_bytes=most),))
        if taken is None:
            with pytest.raises(InfeasiblePlanError, match="'Infeasible'"):
                solve(given)
        else:
            assert sorted(solve(given).taken) == sorted(taken)


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


def test_what_waits_for_a_move_hides_what_is_sent() -> None:
    """By hand: of 5 beside a move of 3, 2 are shown; a reader that needs no move takes 3.5, beside which all 5 are."""
    maker, reader = Choice(name="m", times_us=(0.0,)), Choice(name="r", times_us=(0.0, 3.5))
    moved = Value(
        name="v",
        choice=0,
        made=(0,),
        readers=(Reader(choice=1, wants=(1, 0)),),
        moves_us=((0.0, 3.0), (math.inf, 0.0)),
    )
    sent = Overlap(name="o", sent_us={0: (5.0,)}, computed_us={}, moves={0: 1.0})
    given = Problem(choices=(maker, reader), values=(moved,), overlaps=(sent,))
    assert (given.time_us((0, 0)), given.time_us((0, 1))) == (5.0, 8.5)
    assert solve(given).taken == (0, 0)


def test_few_rounds_end_at_a_plan_that_fits_and_is_the_same_each_time() -> None:
    """What goes into three limits of 60 sizes takes many rounds to find; a plan to begin with is there before."""
    dice = random.Random(0)
    choices = tuple(Choice(name=f"c{k}", times_us=(dice.uniform(5, 9), dice.uniform(0, 4))) for k in range(60))
    sizes = [{k: (0.0, dice.uniform(1, 9)) for k in range(60)} for _ in range(3)]
    limits = tuple(Limit(name=f"l{k}", sizes_bytes=one, most_bytes=100.0) for k, one in enumerate(sizes))
    given = Problem(choices=choices, values=(), limits=limits)
    found = [solve(given, most_rounds=rounds, start=(0,) * 60, gap=1e-6) for rounds in (1, 1, 10**9)]
    assert all(given.fits(one.taken) for one in found)
    assert found[0].taken == found[1].taken
    assert found[2].time_us < found[0].time_us
    assert found[2].time_us - found[2].bound_us <= 1e-5 * found[2].time_us < found[0].time_us - found[0].bound_us


def crowded(seed: int) -> Problem:
    """Three limits, which the fastest alternatives pass by far."""
    dice = random.Random(seed)
    choices = tuple(Choice(name=f"c{k}", times_us=tuple(dice.uniform(0, 9) for _ in range(3))) for k in range(150))
    sizes = [{k: tuple(dice.uniform(0, 9) for _ in range(3)) for k in range(150)} for _ in range(3)]
    limits = tuple(Limit(name=f"l{k}", sizes_bytes=one, most_bytes=500.0) for k, one in enumerate(sizes))
    return Problem(choices=choices, values=(), limits=limits)


def test_shares_that_are_not_whole_take_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keeping what is whole of them is not good enough, nothing is left of having asked."""
    kept, asked = integer_programme._of_whole_ones, []

    def refused(*given: Any) -> None:
        asked.append(kept(*given))

    monkeypatch.setattr(integer_programme, "_of_whole_ones", refused)
    found = [solve(crowded(seed), most_rounds=12) for seed in range(4)]
    assert len(asked) == 4
    monkeypatch.setattr(integer_programme, "_relaxed", lambda highs, problem, most_us: None)
    for seed, one in enumerate(found):
        alone = solve(crowded(seed), most_rounds=12)
        assert 0 < one.bound_us <= one.time_us
        assert (alone.taken, alone.bound_us) == (one.taken, one.bound_us)


@pytest.mark.parametrize(("overlaps", "limits"), EVERY_WAY)
def test_what_is_whole_of_shares_stays_where_that_is_as_good(
    overlaps: int, limits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As good as the gap wants by brute force, too, and by a bound that holds for all combinations."""
    asked, went_on = _counted(monkeypatch, "_of_whole_ones"), _counted(monkeypatch, "_whole")
    for seed in range(150):
        given = problem(seed, overlaps, limits)
        best = best_of_all(given)
        if not math.isinf(best):
            found = solve(given, gap=0.1)
            assert given.fits(found.taken), seed
            assert found.bound_us - 1e-6 <= best <= found.time_us + 1e-9 <= best * 1.1 + 1e-6, seed
    assert 5 < len(asked) - len(went_on) < len(asked), "some are as good, some are not"


def _counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What a function of the module returned, at each of its calls."""
    kept, returned = getattr(integer_programme, name), []

    def counted(*given: Any) -> Any:
        returned.append(kept(*given))
        return returned[-1]

    monkeypatch.setattr(integer_programme, name, counted)
    return returned


def two_ways() -> Problem:
    """By hand: one way shows 2 of what is sent beside computing, the other 3, half of each nothing."""
    ways = Choice(name="w", times_us=(0.0, 0.0))
    one = Overlap(name="o", sent_us={0: (4.0, 0.0)}, computed_us={0: (2.0, 2.0)})
    other = Overlap(name="p", sent_us={0: (0.0, 5.0)}, computed_us={0: (2.0, 2.0)})
    return Problem(choices=(ways,), values=(), overlaps=(one, other))


def test_what_is_known_is_there_where_time_ends_before_anything_better(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(*_: Any) -> None:
        raise SearchTimeError("no plan was found in time")

    monkeypatch.setattr(integer_programme, "_whole", no_time)
    found = solve(two_ways())
    assert (found.taken, found.time_us) == ((0,), 2.0)
    assert found.bound_us < 2.0
    monkeypatch.setattr(integer_programme, "_of_whole_ones", lambda *_: (1,))
    assert solve(two_ways()).taken == (1,)
    assert solve(two_ways(), start=(0,)).taken == (0,)


def test_what_takes_too_long_is_no_solution() -> None:
    problem = crowded(0)
    found = solve(problem)
    assert solve(problem, most_us=found.time_us * 1.01).taken == found.taken
    with pytest.raises(InfeasiblePlanError):
        solve(problem, most_us=found.bound_us * 0.9)


def test_a_search_without_time_is_told_from_one_that_finds_nothing() -> None:
    problem = crowded(0)
    with pytest.raises(SearchTimeError, match="'Time limit reached' after"):
        solve(problem, time_limit_s=0.0)
    with pytest.raises(InfeasiblePlanError) as none:
        solve(problem, most_us=0.0)
    assert not isinstance(none.value, SearchTimeError)
