"""How ranks hear of each other: who is heard of after how many hops, simulated for worlds of any size."""

from __future__ import annotations

import math

import pytest

from lightning_autoparallel.pipeline.dissemination import peers


def rounds_until_all_know(ranks: int) -> list[int]:
    """The messages of each rank; fails where one ends without having heard of all, or hears from whom none sends."""
    schedule = [list(peers(rank, ranks)) for rank in range(ranks)]
    known = [{rank} for rank in range(ranks)]
    for number in range(len(schedule[0])):
        sent = {(rank, schedule[rank][number][0]): frozenset(known[rank]) for rank in range(ranks)}
        for rank in range(ranks):
            known[rank] |= sent[(schedule[rank][number][1], rank)]  # a KeyError: it would wait for ever
    assert all(len(each) == ranks for each in known)
    return [len(each) for each in schedule]


@pytest.mark.parametrize("ranks", [*range(1, 34), 63, 100, 128])
def test_every_rank_hears_of_all(ranks: int):
    assert set(rounds_until_all_know(ranks)) == {math.ceil(math.log2(ranks))}


def test_2048_ranks_send_eleven_messages_each():
    """A ring's all-reduce has every rank send 4,094, one after another."""
    ranks = 2048
    schedule = [list(peers(rank, ranks)) for rank in range(ranks)]
    assert {len(each) for each in schedule} == {11}
    # Whoever starts late or differs is known to all by then: its mark spreads to twice as many in each round.
    marked = {77}
    for number in range(11):
        marked |= {schedule[rank][number][0] for rank in marked}
        assert len(marked) == 2 ** (number + 1)
