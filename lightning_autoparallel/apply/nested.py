"""Rows of a dim in nested chunks (``fx.chunks``) as one collective wants them: equal parts, one after another.

Which row goes where is computed in the graph, on one index per row. How many rows there are may differ between ranks
where axes outside of the group cut the dim first: then their graphs differ in one constant, and in no shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.fx.chunk_rows import chunk

aten = torch.ops.aten

Index = fx.Node | int  # one number per row, or the same for all


@dataclass(frozen=True, kw_only=True)
class NestedChunks:
    """``rows`` of a local dim in nested chunks over axes of ``counts`` ranks, the first cut first.

    ``padded_rows`` is the size of the dim, as large as any rank's; ``part`` is the size that chunks are padded to.
    """

    rows: int
    padded_rows: int
    counts: tuple[int, ...]
    part: int

    def start_of(self, rank: int) -> int:
        """The first row of ``rank`` of a single axis."""
        (count,) = self.counts
        return chunk(self.rows, count, rank)[0]

    def separate(self, emitter: GraphEmitter, node: fx.Node, dim: int) -> fx.Node:
        """The chunks of all ranks in ``dim``, each padded with rows that happen to be there."""
        numbers = _Numbers(emitter)
        places = numbers.up_to(math.prod(self.counts) * self.part, node)
        rank = numbers.div(places, self.part)
        row: Index = numbers.sub(places, numbers.mul(rank, self.part))
        rows: Index = self.rows
        inside = math.prod(self.counts)
        for count in self.counts:
            inside //= count
            own = numbers.mod(numbers.div(rank, inside) if inside > 1 else rank, count)
            size = numbers.chunk_size(rows, count)
            start = numbers.mul(own, size)
            row = numbers.add(row, start)
            rows = numbers.at_most(numbers.sub(rows, start), size)
        return emitter.call(aten.index_select.default, node, dim, numbers.at_most(row, self.padded_rows - 1))

    def join(self, emitter: GraphEmitter, node: fx.Node, dim: int) -> fx.Node:
        """The rows in order from the padded chunks of all ranks; what follows the last row is padding."""
        numbers = _Numbers(emitter)
        row: Index = numbers.up_to(self.padded_rows, node)
        rows: Index = self.rows
        rank: Index = 0
        for count in self.counts:
            size = numbers.chunk_size(rows, count)
            own = numbers.at_most(numbers.div(row, size), count - 1)
            start = numbers.mul(own, size)
            row = numbers.sub(row, start)
            rows = numbers.at_most(numbers.sub(rows, start), size)
            rank = own if isinstance(rank, int) else numbers.add(numbers.mul(rank, count), own)
        places = numbers.add(numbers.mul(rank, self.part), numbers.at_most(row, self.part - 1))
        return emitter.call(aten.index_select.default, node, dim, places)


class _Numbers:
    """Whole numbers in a graph. Which calls there are depends on no value but on what is an ``int``: ranks agree."""

    def __init__(self, emitter: GraphEmitter) -> None:
        self._emitter = emitter

    def up_to(self, count: int, like: fx.Node) -> fx.Node:
        """0, 1, ... on the device of ``like``."""
        device = like.meta["val"].device
        return self._emitter.call(aten.arange.default, count, dtype=torch.int64, device=device)

    def add(self, a: Index, b: Index) -> Index:
        return a + b if isinstance(a, int) and isinstance(b, int) else self._call(aten.add.Tensor, a, b)

    def sub(self, a: Index, b: Index) -> Index:
        return a - b if isinstance(a, int) and isinstance(b, int) else self._call(aten.sub.Tensor, a, b)

    def mul(self, a: Index, b: Index) -> Index:
        return a * b if isinstance(a, int) and isinstance(b, int) else self._call(aten.mul.Tensor, a, b)

    def div(self, a: Index, b: Index) -> Index:
        """Rounded down."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return self._call(aten.div.Tensor_mode, a, b, rounding_mode="floor")

    def mod(self, a: Index, b: int) -> Index:
        return a % b if isinstance(a, int) else self._call(aten.remainder.Scalar, a, b)

    def at_most(self, a: Index, b: Index) -> Index:
        if isinstance(b, int):
            return min(a, b) if isinstance(a, int) else self._call(aten.clamp_max.default, a, b)
        return self._call(aten.minimum.default, a, b)

    def chunk_size(self, rows: Index, count: int) -> Index:
        """The largest of ``count`` chunks; 1 where there are no rows, whose places nobody reads."""
        size = self.div(self.add(rows, count - 1), count)
        return max(size, 1) if isinstance(size, int) else self._call(aten.clamp_min.default, size, 1)

    def _call(self, target: Any, *args: Index, **kwargs: Any) -> fx.Node:
        return self._emitter.call(target, *args, **kwargs)
