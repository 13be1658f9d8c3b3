"""A tensor and the parts of it that the ranks of one group hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.nested import NestedChunks
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.chunk_rows import chunk_sizes, lies_flat, nested_chunk
from lightning_autoparallel.fx.placements import cut_order, touch
from lightning_autoparallel.torch_compat.sharding import split_factor_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Parts:
    """``whole`` as a view of shape ``split``, in which ``rank_dims`` count the ranks of each axis of the group.

    ``whole`` is what one rank has when nothing is cut over the group; ``padded`` is it with every dim a multiple of its
    cuts; ``part`` is what each rank of the group has of that. The dims in ``nested`` are cut into nested chunks, of
    which a padded whole would hold other rows.
    """

    whole: tuple[int, ...]
    padded: tuple[int, ...]
    part: tuple[int, ...]
    split: tuple[int, ...]
    rank_dims: tuple[int, ...]
    nested: Mapping[int, NestedChunks] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return math.prod(self.split[i] for i in self.rank_dims)

    @property
    def ranks_first(self) -> list[int]:
        """The dims of ``split``, those that count ranks before the others."""
        return [*self.rank_dims, *(i for i in range(len(self.split)) if i not in self.rank_dims)]

    @property
    def in_order(self) -> bool:
        """Whether the parts lie in memory one after another: nothing is copied to join or to separate them."""
        moved = [i for i in self.ranks_first if self.split[i] > 1]
        return moved == sorted(moved)

    def pad(self, emitter: GraphEmitter, node: fx.Node, dim: int) -> fx.Node:
        """``dim`` as large as all its parts together."""
        missing = self.padded[dim] - self.whole[dim]
        if not missing:
            return node
        padding = [0, 0] * (len(self.whole) - 1 - dim) + [0, missing]
        return emitter.call(aten.constant_pad_nd.default, node, padding)

    def separate(self, emitter: GraphEmitter, node: fx.Node) -> fx.Node:
        """(ranks, part...) from the whole, padded where it is uneven."""
        for dim in range(len(self.whole)):
            nested = self.nested.get(dim)
            node = self.pad(emitter, node, dim) if nested is None else nested.separate(emitter, node, dim)
        node = emitter.contiguous(node)
        if not self.in_order:
            node = emitter.view(node, list(self.split))
            node = emitter.contiguous(emitter.call(aten.permute.default, node, self.ranks_first))
        return emitter.view(node, [self.ranks, *self.part])

    def join(self, emitter: GraphEmitter, node: fx.Node) -> fx.Node:
        """The whole from the parts of all ranks, one after another; without padding."""
        if not self.in_order:
            order = self.ranks_first
            node = emitter.view(node, [self.split[i] for i in order])
            back = [order.index(i) for i in range(len(order))]
            node = emitter.contiguous(emitter.call(aten.permute.default, node, back))
        node = emitter.view(node, list(self.padded))
        for dim, (size, padded) in enumerate(zip(self.whole, self.padded, strict=True)):
            if dim in self.nested:
                node = self.nested[dim].join(emitter, node, dim)
            elif size != padded:
                node = emitter.call(aten.slice.Tensor, node, dim, 0, size)
        return node


def parts_of(
    shape: Sequence[int],
    whole: Sequence[int],
    cuts: Placements,
    positions: Sequence[int],
    axes: Sequence[PlanAxis],
) -> Parts:
    """How the axes at ``positions`` (in the order in which the group counts its ranks) cut ``whole``.

    ``cuts`` are explicit placements over all ``axes``; what the other axes cut of the global ``shape``, ``whole`` has
    lost already.
    """
    split: list[int] = []
    found: dict[int, int] = {}
    nested: dict[int, NestedChunks] = {}
    padded, part = list(whole), list(whole)
    for dim in range(len(whole)):
        blocks, end = _blocks(cuts, dim, positions, axes)
        part[dim] = math.ceil(whole[dim] / end) * end // math.prod(axes[i].size for i, _ in blocks)
        padded[dim] = math.ceil(whole[dim] / end) * end
        for i, gap in blocks:
            split += [gap] if gap > 1 else []
            found[i] = len(split)
            split.append(axes[i].size)
        split.append(padded[dim] // end)
        chunks = _nested_chunks(shape[dim], whole[dim], cuts, cut_order(cuts, dim), positions, axes)
        if chunks is not None:
            nested[dim] = chunks
    return Parts(
        whole=tuple(whole),
        padded=tuple(padded),
        part=tuple(part),
        split=tuple(split),
        rank_dims=tuple(found[i] for i in positions),
        nested=nested,
    )


def _nested_chunks(
    size: int,
    local_size: int,
    cuts: Placements,
    order: Sequence[int],
    positions: Sequence[int],
    axes: Sequence[PlanAxis],
) -> NestedChunks | None:
    """How the axes of the group cut a dim of global ``size``; None where that leaves what even parts hold."""
    outer = [i for i in order if i not in positions]
    counts = [axes[i].size for i in order if i in positions]
    if not counts or size % math.prod(axes[i].size for i in order) == 0 or not touch(order, cuts, axes):
        return None
    assert order[: len(outer)] == outer, f"{cuts} cut outer axes of dim of {size} after inner ones"
    part = math.ceil(local_size / math.prod(counts))
    if all(lies_flat(rows, counts, part) for rows in chunk_sizes(size, [axes[i].size for i in outer])):
        return None
    _, rows = nested_chunk(size, [(axes[i].size, axes[i].rank) for i in outer])
    return NestedChunks(rows=rows, padded_rows=local_size, counts=tuple(counts), part=part)


def _blocks(
    cuts: Placements, dim: int, positions: Sequence[int], axes: Sequence[PlanAxis]
) -> tuple[list[tuple[int, int]], int]:
    """(axis, blocks between the cut before it and its own) in cut order, and into how many pieces all of them cut.

    What axes outside the group cut before is gone from a local tensor: their share of the blocks is not counted.
    """
    blocks, elsewhere, end = [], 1, 1
    for i in cut_order(cuts, dim):
        if i not in positions:
            elsewhere *= axes[i].size
            continue
        before = split_factor_of(cuts[i]) // elsewhere
        blocks.append((i, before // end))
        end = before * axes[i].size
    return blocks, end
