"""The fastest plan for the room that a rank has, and of equally fast ones the leanest, on problems made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import fx
from torch.distributed.tensor.placement_types import Replicate

from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.plan import memory_room
from lightning_autoparallel.plan.memory_room import best_that_fits, check_room, leaner, stays_bytes
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter, Lying
from lightning_autoparallel.plan.problem import Choice, Limit, Problem


def two(room: float, times: tuple[float, ...], sizes: tuple[float, ...], passing: tuple[float, ...]) -> Problem:
    """Two choices with the same alternatives; what passes is there of one at a time."""
    one = Choice(name="c", times_us=times)
    limit = Limit(
        name="room",
        sizes_bytes={0: sizes, 1: sizes},
        most_bytes=room,
        passing_bytes=({0: passing}, {1: passing}),
    )
    return Problem(choices=(one, one), values=(), limits=(limit,))


def test_the_fastest_is_taken_where_it_fits_and_else_the_fastest_that_does() -> None:
    """Fast ones stay with 10 bytes, slow ones with 1 while 4 pass: 20, 15 and 6 bytes of both."""
    for room, time_us in ((math.inf, 2.0), (20.0, 2.0), (19.0, 6.0), (15.0, 6.0), (14.0, 10.0), (6.0, 10.0)):
        given = two(room, (1.0, 5.0), (10.0, 1.0), (0.0, 4.0))
        found = best_that_fits(given)
        assert (found.time_us, given.fits(found.taken)) == (time_us, True), room


def test_where_none_fits_it_is_the_one_of_least_memory() -> None:
    given = two(5.0, (1.0, 5.0, 5.0), (10.0, 1.0, 1.5), (0.0, 4.0, 4.0))
    found = best_that_fits(given)
    assert (found.taken, stays_bytes(given, found.taken)) == ((1, 1), 6.0)


def test_what_passes_counts_where_none_fits() -> None:
    """What stays is least where most passes: 2 + 20 bytes for 6 + 4."""
    given = two(5.0, (1.0, 5.0, 5.0), (10.0, 1.0, 3.0), (0.0, 20.0, 4.0))
    found = best_that_fits(given)
    assert (found.taken, stays_bytes(given, found.taken)) == ((2, 2), 10.0)


def test_of_equally_fast_ones_the_leanest() -> None:
    """Within a fifth of a percent; what is slower than that is not taken for any number of bytes."""
    for times, taken in (((100.0, 100.0), (1, 1)), ((100.0, 100.05), (1, 1)), ((100.0, 101.0), (0, 0))):
        given = two(30.0, times, (10.0, 1.0), (0.0, 0.0))
        assert leaner(given, best_that_fits(given)) == taken


def test_what_the_room_decided_is_not_made_leaner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is solved for that; what fits without its being asked is."""
    roomy, tight = (two(room, (100.0, 100.0, 101.0), (10.0, 9.0, 1.0), (0.0,) * 3) for room in (30.0, 11.0))
    solved = [best_that_fits(given) for given in (roomy, tight)]
    assert [each.is_for_room for each in solved] == [False, True]

    def unasked(*_: Any, **__: Any) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(memory_room, "solve", unasked)
    assert leaner(tight, solved[1]) == solved[1].taken
    with pytest.raises(AssertionError, match="solved again"):
        leaner(roomy, solved[0])


def test_memory_without_end_is_worth_nothing() -> None:
    given = two(math.inf, (100.0, 100.001), (10.0, 1.0), (0.0, 0.0))
    assert leaner(given, best_that_fits(given)) == (0, 0)


GIB = 2**30


def lying(size: float, gathered: float = 0.0, **stored: int) -> Lying:
    nothing = {"update_us": 0.0, "copied_us": 0.0, "gathered_us": 0.0, "reduced_us": 0.0}
    whole = Replicate()
    return Lying(
        computed=whole, stored=stored, end=whole, size_bytes=size * GIB, gathered_bytes=gathered * GIB, **nothing
    )


def parameters(*ways: tuple[Lying, ...]) -> dict[fx.Node, FreeParameter]:
    graph = fx.Graph()
    return {graph.placeholder(f"p{i}"): FreeParameter(name=f"p{i}", ways=w, gradient=None) for i, w in enumerate(ways)}


@pytest.mark.parametrize(
    ("ways", "room", "told"),
    [
        # of 16 GiB a rank of 4 has 4: in 2 there is room for its share among twice as many
        ([(lying(16), lying(4, dp_shard=0))], 2.0, r"room for 2 \(most take p0 4\): 2 times more ranks on dp_shard"),
        # 1 GiB stays gathered however many ranks there are: 2 more are to shrink to 1
        ([(lying(8), lying(3, 1, dp_shard=0))], 2.0, r"1 GiB of it stays gathered .*: 2 times more ranks"),
        ([(lying(8), lying(3, 1, dp_shard=0))], 1.0, r"stays gathered .*\): a larger memory_budget_gib"),
        # frozen: whole it takes less than a share of it with what would be gathered
        ([(lying(10), lying(12.5, 10, dp_shard=0))], 4.0, r"\(most take p0 10\): a larger memory_budget_gib"),
    ],
)
def test_what_would_make_room_for_parameters(ways: list[tuple[Lying, ...]], room: float, told: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=told):
        check_room(parameters(*ways), room * GIB)
    check_room(parameters(*ways), 100.0 * GIB)
