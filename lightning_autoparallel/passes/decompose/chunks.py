"""One rank's chunk of a value, and whole values of the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.passes.decompose.cuts import Cut
from lightning_autoparallel.torch_compat.rank_operators import RANK_CAT, RANK_CHUNK, RANK_SUM

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class RelativeChunks:
    """Chunks and parts counted from the own rank on: what a rank does is said by operators of ours."""

    ranks: int
    group: str

    def chunk(self, call: Calls, node: fx.Node, cut: Cut, step: int) -> fx.Node:
        """What belongs to the rank ``step`` further on."""
        return _chunk(call, node, cut, lambda x, dim: call(RANK_CHUNK, x, dim, step, self.ranks, self.group))

    def joined(self, call: Calls, parts: Sequence[fx.Node], cut: Cut) -> fx.Node:
        """All parts along a dim, in the order of ranks."""
        return _joined(call, parts, cut, lambda ready, dim: call(RANK_CAT, ready, dim, self.group))

    def added(self, call: Calls, parts: Sequence[fx.Node]) -> fx.Node:
        """The sum of all parts in the order of ranks: alike on all of them, to the bit."""
        return call(RANK_SUM, list(parts), self.group)


@dataclass(frozen=True, kw_only=True)
class AbsoluteChunks:
    """Chunks and parts counted from rank 0 on, the same on every rank."""

    ranks: int

    def chunk(self, call: Calls, node: fx.Node, cut: Cut, step: int) -> fx.Node:
        """What belongs to rank ``step``."""

        def take(x: fx.Node, dim: int) -> fx.Node:
            size = x.meta["val"].shape[dim] // self.ranks
            return call(aten.slice.Tensor, x, dim, step * size, (step + 1) * size)

        return _chunk(call, node, cut, take)

    def joined(self, call: Calls, parts: Sequence[fx.Node], cut: Cut) -> fx.Node:
        """All parts along a dim."""
        return _joined(call, parts, cut, lambda ready, dim: call(aten.cat.default, ready, dim))

    def added(self, call: Calls, parts: Sequence[fx.Node]) -> fx.Node:
        """The sum of all parts."""
        total = parts[0]
        for part in parts[1:]:
            total = call(aten.add.Tensor, total, part)
        return total


Chunks = RelativeChunks | AbsoluteChunks


def _chunk(call: Calls, node: fx.Node, cut: Cut, take: Callable[[fx.Node, int], fx.Node]) -> fx.Node:
    if node.target is aten.t.default and node.meta["val"].dim() == 2:
        # The rows of what was transposed lie together.
        source = node.args[0]
        assert isinstance(source, fx.Node)
        turned = Cut(dim=1 - cut.dim, outer=cut.outer, inner=cut.inner)
        return call(aten.t.default, _chunk(call, source, turned, take))
    if cut.outer == 1:
        return take(node, cut.dim)
    shape = list(node.meta["val"].shape)
    spread = call.view(node, cut.spread(shape, shape[cut.dim] // cut.outer))
    return call.view(take(spread, cut.dim + 1), cut.part_of(shape))


def _joined(call: Calls, parts: Sequence[fx.Node], cut: Cut, join: Callable[[list[fx.Node], int], fx.Node]) -> fx.Node:
    if cut.outer == 1:
        return join(list(parts), cut.dim)
    shape = list(parts[0].meta["val"].shape)
    spread = [call.view(part, cut.spread(shape, cut.inner)) for part in parts]
    shape[cut.dim] *= len(parts)
    return call.view(join(spread, cut.dim + 1), shape)
