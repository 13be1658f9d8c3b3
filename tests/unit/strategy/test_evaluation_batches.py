"""Which rows each rank evaluates: every row once, as many batches on every rank, the global batches of one device."""

from __future__ import annotations

import itertools

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_autoparallel.strategy.evaluation_batches import EvaluationBatches, batches_of, share_out_evenly


def made(rows: int, ranks: int, size: int, pads: bool = False, drop_last: bool = False) -> list[EvaluationBatches]:
    samplers = [DistributedSampler(range(rows), num_replicas=ranks, rank=rank, shuffle=False) for rank in range(ranks)]
    return [EvaluationBatches(sampler, size, drop_last, lambda: pads) for sampler in samplers]


GRID = list(itertools.product((0, 1, 2, 3, 7, 8, 9, 12, 29, 64), (2, 3, 5, 8), (1, 2, 4)))


@pytest.mark.parametrize(("rows", "ranks", "size"), GRID)
def test_every_row_is_counted_once(rows: int, ranks: int, size: int) -> None:
    everyone = made(rows, ranks, size)
    lengths = {len(batches) for batches in everyone} | {len(list(batches)) for batches in everyone}
    assert len(lengths) == 1
    (common_from,) = {batches.common_from() for batches in everyone}
    seen: list[int] = []
    for index, parts in enumerate(zip(*map(list, everyone), strict=True)):
        assert len({len(part) for part in parts}) == 1
        if index >= common_from:
            assert all(part == parts[0] for part in parts)
            assert len(parts[0]) <= max(1, 4 * size)
        seen += parts[0] if index >= common_from else [row for part in parts for row in part]
    assert sorted(seen) == list(range(rows))


@pytest.mark.parametrize(("rows", "ranks", "size"), GRID)
def test_predicted_rows_are_each_rank_s_own_but_for_the_spare(rows: int, ranks: int, size: int) -> None:
    everyone = made(rows, ranks, size, pads=True)
    assert len({len(list(batches)) for batches in everyone} | {-(-rows // (ranks * size))}) == 1
    own = [
        row
        for batches in everyone
        for index, batch in enumerate(batches)
        for row in batch[: len(batch) - batches.spare_rows(index)]
    ]
    assert sorted(own) == list(range(rows))


@pytest.mark.parametrize(("rows", "ranks", "size"), GRID)
def test_as_many_rows_are_collected_as_of_a_distributed_sampler(rows: int, ranks: int, size: int) -> None:
    samplers = [DistributedSampler(range(rows), num_replicas=ranks, rank=rank, shuffle=False) for rank in range(ranks)]
    everyone = [EvaluationBatches(sampler, size, False, lambda: False, collects=True) for sampler in samplers]
    assert len({len(batches) for batches in everyone} | {len(list(batches)) for batches in everyone}) == 1
    collected = [[row for batch in batches for row in batch] for batches in everyone]
    assert [len(mine) for mine in collected] == [len(list(sampler)) for sampler in samplers]
    assert {row for mine in collected for row in mine} == set(range(rows))


def test_global_batches_are_those_of_one_device() -> None:
    first, second = (list(batches) for batches in made(11, 2, 2))
    assert [sorted({*mine, *theirs}) for mine, theirs in zip(first, second, strict=True)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10],
    ]


def test_what_does_not_fill_a_batch_is_left_out_where_the_loader_says_so() -> None:
    assert [list(batches) for batches in made(7, 2, 2, drop_last=True)] == [[[0, 2]], [[1, 3]]]


def test_many_last_rows_are_shared_out_as_far_as_they_can_be() -> None:
    first, *_ = made(29, 8, 4)
    assert list(first) == [[0, 8, 16], [24, 25, 26, 27, 28]]
    assert first.common_from() == 1


def loader(sampler: DistributedSampler, **options: object) -> DataLoader:
    return DataLoader(range(7), sampler=sampler, **options)  # type: ignore[arg-type]


def test_every_rank_has_rows_of_its_own_where_there_are_as_many_rows_as_ranks() -> None:
    for first in (made(3, 2, 2)[0], made(7, 4, 4)[0]):
        assert first.common_from() == 1
    assert made(1, 2, 2)[0].common_from() == 0


def test_shuffled_rows_follow_the_epoch() -> None:
    sampler = DistributedSampler(range(7), num_replicas=2, rank=0, shuffle=True)
    shared = loader(sampler, batch_size=2)
    share_out_evenly(shared, lambda: False, nobody)
    first = list(batches_of(shared) or ())
    sampler.set_epoch(1)
    assert list(batches_of(shared) or ()) != first


def nobody(rows: int) -> None:
    raise AssertionError(f"{rows} rows are said to be repeated")


def test_rows_that_two_ranks_hold_are_told_of() -> None:
    for rows, pads, told_of in ((7, True, [1]), (8, True, []), (7, False, [])):
        told: list[int] = []
        shared = DataLoader(range(rows), sampler=DistributedSampler(range(rows), 2, 0), batch_size=2)  # type: ignore[arg-type]
        share_out_evenly(shared, lambda pads=pads: pads, told.append)
        assert list(shared) and told == told_of


class OwnSampler(DistributedSampler):
    """A user's."""


class OwnBatches(BatchSampler):
    """A user's."""


def test_what_is_the_user_s_own_is_left_alone() -> None:
    inner, told = DistributedSampler(range(7), num_replicas=2, rank=0), []
    for mine in (
        loader(OwnSampler(range(7), num_replicas=2, rank=0), batch_size=2),
        loader(DistributedSampler(range(7), num_replicas=2, rank=0, drop_last=True), batch_size=2),
        DataLoader(range(7), batch_sampler=OwnBatches(inner, 2, False)),
        loader(DistributedSampler(range(7), num_replicas=1, rank=0), batch_size=2),
    ):
        share_out_evenly(mine, lambda: False, told.append)
        assert batches_of(mine) is None
    assert told == [1], "the batch sampler of the user's has a row on both ranks"


def test_items_that_are_batches() -> None:
    items = [loader(DistributedSampler(range(7), 2, rank, shuffle=False), batch_size=None) for rank in range(2)]
    for one in items:
        share_out_evenly(one, lambda: False, nobody)
    assert [list(one) for one in items] == [[0, 2, 4, 6], [1, 3, 5, 6]]
    assert len(items[0]) == 4
