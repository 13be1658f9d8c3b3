"""Ranks agree on each backward of a call; one that has none of it joins."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.pipeline.backward_calls import BackwardCalls, Results

SECONDS = 20


class Ranks:
    """What a control group does, for two threads."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(2, timeout=SECONDS), [None, None]

    def of(self, rank: int) -> Any:
        return _Control(self, rank)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class _Control:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def agrees(self, text: str) -> bool:
        return len(set(self._ranks.exchange(self._rank, text))) == 1

    def gather(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self._rank, value)


def backwards(order: list[list[int]], calls: int = 3) -> list[list[str]]:
    """What each rank ran when its autograd comes to calls in its ``order``."""
    ranks = Ranks()

    def rank_of(rank: int) -> list[str]:
        ran: list[str] = []
        numbers: list[int] = []
        found = BackwardCalls(ranks.of(rank))
        for number in range(calls):
            numbers.append(found.add(_noting(ran, f"joined {number}")))
        for number in order[rank]:
            assert found.reach(numbers[number], (0,), _running(ran, number)) == number
        assert len(found.end()) == sum(text.startswith("joined") for text in ran)
        return ran

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank_of, range(2)))


def _noting(ran: list[str], text: str) -> Callable[[], Any]:
    def join(results: Results) -> Any:
        assert results == (0,)
        ran.append(text)
        return [("parameter", "gradient")]

    return join


def _running(ran: list[str], number: int) -> Callable[[bool, Results], int]:
    def run(last: bool, results: Results) -> int:
        ran.append(f"ran {number}{' for the last time' if last else ''}")
        return number

    return run


def test_ranks_that_run_the_same_run_it_once():
    assert backwards([[2, 0], [2, 0]]) == [["ran 2 for the last time", "ran 0 for the last time"]] * 2


def test_a_rank_without_gradients_joins():
    ran, joined = backwards([[2, 1, 0], [2, 0]])
    assert ran == ["ran 2 for the last time", "ran 1", "ran 0 for the last time"]
    assert joined == ["ran 2 for the last time", "joined 1", "ran 0 for the last time"]


def test_a_rank_that_is_done_joins_until_all_are():
    ran, joined = backwards([[2, 1], []])
    assert ran == ["ran 2", "ran 1"] and joined == ["joined 2", "joined 1"]


def test_every_rank_runs_the_same_calls_in_the_same_order_whatever_its_own_is():
    one, other = backwards([[2, 1, 0], [1, 2, 0]])
    assert [text.split()[1] for text in one] == [text.split()[1] for text in other]
    for ran in (one, other):
        assert {tuple(text.split()[:2]) for text in ran} >= {("ran", "2"), ("ran", "1"), ("ran", "0")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [([(0,), (0,)], (0,)), ([(0,), (1, 2)], (0, 1, 2)), ([(), (3,)], (3,)), ([(10,), (2,)], (2, 10))],
)
def test_what_any_rank_has_gradients_of(given: list[Results], expected: Results):
    """All run the backward for those results, and for the last time: nobody is elsewhere."""
    ranks = Ranks()

    def rank_of(rank: int) -> Any:
        found = BackwardCalls(ranks.of(rank))
        number = found.add(lambda results: [])
        ran = found.reach(number, given[rank], lambda *what: what)
        assert found.end() == []
        return ran

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_of, range(2))) == [(True, expected)] * 2


def test_who_joins_is_told_the_results_of_those_who_run():
    ranks, told = Ranks(), []

    def rank_of(rank: int) -> None:
        found = BackwardCalls(ranks.of(rank))
        number = found.add(lambda results: told.append(results) or [])
        if rank == 0:
            assert found.reach(number, (1, 4), lambda *what: what) == (False, (1, 4))
        found.end()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_of, range(2)))
    assert told == [(1, 4)]


def test_a_rank_elsewhere_is_an_error_on_both():
    ranks = Ranks()

    def go(rank: int) -> str:
        control = ranks.of(rank)
        if rank:
            assert not control.agrees("the end of training_step")
            return str(control.gather("the end of training_step"))
        found = BackwardCalls(control)
        with pytest.raises(OtherRankError, match="rank 1 at 'the end of training_step'") as caught:
            found.end()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(go, range(2)))) == 2
