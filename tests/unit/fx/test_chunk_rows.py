"""Nested chunks against DTensor's own, and against rows that are counted one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from torch.distributed.tensor.placement_types import Shard

from lightning_autoparallel.fx.chunk_rows import chunk, chunk_sizes, lies_flat, nested_chunk

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (4, 3, 2)]


def chunks(rows: int, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    ranks = itertools.product(*map(range, counts))
    return [nested_chunk(rows, zip(counts, rank, strict=True)) for rank in ranks]


def test_five_rows_over_two_by_two():
    assert chunks(5, (2, 2)) == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert chunks(5, (4,)) == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert chunks(6, (2, 2)) == [(0, 2), (2, 1), (3, 2), (5, 1)]


@pytest.mark.parametrize("counts", MESHES, ids=str)
def test_as_dtensor_chunks_axis_by_axis(counts: tuple[int, ...]):
    for rows, rank in itertools.product(range(30), itertools.product(*map(range, counts))):
        size, start = rows, 0
        for count, own in zip(counts, rank, strict=True):
            size, offset = Shard.local_shard_size_and_offset(size, count, own)
            start += offset
        found = nested_chunk(rows, zip(counts, rank, strict=True))
        assert found[1] == size
        assert size == 0 or found[0] == start


@pytest.mark.parametrize("counts", MESHES, ids=str)
def test_chunks_hold_all_rows_and_the_largest_is_as_in_even_parts(counts: tuple[int, ...]):
    for rows in range(40):
        found = chunks(rows, counts)
        assert [start + i for start, size in found for i in range(size)] == list(range(rows))
        assert max(size for _, size in found) == math.ceil(rows / math.prod(counts))
        assert chunk_sizes(rows, counts) == {size for _, size in found}


@pytest.mark.parametrize("counts", MESHES, ids=str)
def test_chunks_lie_flat_where_they_are_those_of_one_axis(counts: tuple[int, ...]):
    count = math.prod(counts)
    for rows in range(40):
        one_axis = [chunk(rows, count, rank) for rank in range(count)]
        same = all(c == d or c[1] == d[1] == 0 for c, d in zip(chunks(rows, counts), one_axis, strict=True))
        assert lies_flat(rows, counts, math.ceil(rows / count)) == same


def test_some_uneven_dims_lie_flat_and_some_do_not():
    assert [rows for rows in range(1, 9) if not lies_flat(rows, (2, 2), math.ceil(rows / 4))] == [2, 5, 6]
