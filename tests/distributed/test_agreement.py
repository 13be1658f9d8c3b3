"""Ranks of a real gloo world agree, differ, come late and fail: around a ring, as few do, and by dissemination."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.pipeline import agreement
from lightning_autoparallel.pipeline.agreement import ControlGroup
from tests.support.worlds import Worlds

RANKS = 4


class Disseminating(ControlGroup):
    """As among many ranks."""

    ring_up_to = 1


KINDS = {"ring": ControlGroup, "dissemination": Disseminating}


def answers(kind: str, rounds: int) -> list[object]:
    """What one rank is told, in order."""
    control, rank = KINDS[kind](timedelta(seconds=60)), dist.get_rank()
    told: list[object] = []
    for number in range(rounds):
        odd_one = rank == number % RANKS
        told.append(control.agrees("same"))
        told.append(control.agrees("other" if odd_one else "same"))
        told.append(control.any([odd_one, False, rank == 0 and number == 0]))
        told.append(control.gather(rank))
        told.append(control.told_by_first(f"rank {rank}" * (1 if rank else 1000))[:6])
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_told_alike(kind: str, worlds: Worlds):
    each = [True, False, [True, False, True], [0, 1, 2, 3], "rank 0"]
    later = [True, False, [True, False, False], [0, 1, 2, 3], "rank 0"]
    for told in worlds(RANKS).run(answers, kind, 5):
        assert told == [*each, *later * 4]


def answers_of_shards(kind: str) -> list[bool | None]:
    """What a rank is told of pairs of ranks that share a batch shard, among questions that know no shards."""
    control, rank = KINDS[kind](timedelta(seconds=60), shards=[0, 0, 1, 1]), dist.get_rank()
    return [
        control.agrees("same"),
        control.agrees_in_shards("here", f"rows of shard {rank // 2}"),
        control.agrees_in_shards("here", f"rows of rank {rank}" if rank > 1 else "rows"),
        control.agrees("other" if rank == 3 else "same"),
        control.agrees_in_shards("there" if rank == 3 else "here", "rows"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_within_their_batch_shards(kind: str, worlds: Worlds):
    for told in worlds(RANKS).run(answers_of_shards, kind):
        assert told == [True, True, False, False, None]


def late_ones(kind: str) -> tuple[bool, int]:
    """Whether a rank that waits for another says so, once, and whether both agree in the end."""
    control = KINDS[kind](timedelta(seconds=60))
    dist.barrier()
    with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.5)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if dist.get_rank() == 2:
            time.sleep(2)
        return control.meet("here", "waits"), [str(warning.message) for warning in told].count("waits")


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_says_so_and_goes_on(kind: str, worlds: Worlds):
    told = worlds(RANKS).run(late_ones, kind)
    assert all(agreed for agreed, _ in told)
    assert [calls for _, calls in told] == [1, 1, 0, 1]


def one_that_never_comes(kind: str) -> bool | None:
    control = KINDS[kind](timedelta(seconds=60))
    dist.barrier()
    with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=1)):
        return None if dist.get_rank() == 1 else control.meet_soon("here")


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_ever(kind: str, worlds: Worlds):
    assert worlds(RANKS).run(one_that_never_comes, kind) == [None] * RANKS


def one_fails(kind: str) -> str:
    control = KINDS[kind](timedelta(seconds=60))
    try:
        control.raise_together(ConfigError("no such axis") if dist.get_rank() == 3 else None)
    except AutoParallelError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_failed_is_named(kind: str, worlds: Worlds):
    assert worlds(RANKS).run(one_fails, kind) == ["rank 3 stopped: no such axis"] * 3 + ["no such axis"]
