"""Where the rows of a dim lie that several mesh axes cut one after another, in the chunks that DTensor makes.

Each axis gives its ranks ``ceil(rows / ranks)`` rows of what the axis before left, the last ones fewer or none: 5 rows
over 2 x 2 ranks are 3 and 2, then 2, 1, 1, 1. One axis of 4 ranks would make 2, 2, 1, 0 of them. Nested or flat, the
largest chunk has ``ceil(5 / 4)`` rows, so that all are padded to the same size; but other rows are padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def chunk(rows: int, count: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of ``rank`` out of ``count``."""
    part = math.ceil(rows / count)
    start = min(rank * part, rows)
    return start, min(part, rows - start)


def nested_chunk(rows: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """First row and number of rows of one rank; ``cuts`` are (ranks, this rank) of each axis, the first cut first."""
    start = 0
    for count, rank in cuts:
        offset, rows = chunk(rows, count, rank)
        start += offset
    return start, rows


def chunk_sizes(rows: int, counts: Iterable[int]) -> set[int]:
    """All numbers of rows that a rank may have after cuts over ``counts`` ranks, the first cut first."""
    sizes = {rows}
    for count in counts:
        sizes = {chunk(size, count, rank)[1] for size in sizes for rank in range(count)}
    return sizes


def lies_flat(rows: int, counts: Sequence[int], part: int) -> bool:
    """Whether cuts over ``counts`` ranks leave each rank the rows that its ``part`` rows of a padded tensor hold."""
    starts = [0]
    sizes = [rows]
    for count in counts:
        pieces = [chunk(size, count, rank) for size in sizes for rank in range(count)]
        starts = [starts[i // count] + offset for i, (offset, _) in enumerate(pieces)]
        sizes = [size for _, size in pieces]
    return all(size == 0 or start == i * part for i, (start, size) in enumerate(zip(starts, sizes, strict=True)))
