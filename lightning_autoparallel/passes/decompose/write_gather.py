"""An all-gather and the products that read it, written as transfers between which products of one shard run."""

from __future__ import annotations

from functools import partial

from torch import fx

from lightning_autoparallel.fx.added_calls import Calls, FakeResults
from lightning_autoparallel.passes.bucketing.moves import hoist
from lightning_autoparallel.passes.decompose.chunks import AbsoluteChunks, Chunks, RelativeChunks
from lightning_autoparallel.passes.decompose.cuts import Cut, move_part
from lightning_autoparallel.passes.decompose.gathers import PARTIAL, Gather
from lightning_autoparallel.passes.decompose.options import DecomposeOptions
from lightning_autoparallel.passes.decompose.product_parts import CutProduct
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.rank_operators import SHARD_PERMUTE


def write_gather(gather: Gather, options: DecomposeOptions, results: FakeResults | None = None) -> None:
    """Replace the gather, and its products by their parts joined or added."""
    _Writer(gather, options, results or FakeResults()).write()


class _Writer:
    def __init__(self, gather: Gather, options: DecomposeOptions, results: FakeResults) -> None:
        self._calls = partial(Calls, results=results)
        self._gather, self._options = gather, options
        self._anchor = gather.products[0].product.node
        is_broadcast = options.order == "broadcast"
        ranks, group = gather.ranks, gather.group
        self._chunks: Chunks = AbsoluteChunks(ranks=ranks) if is_broadcast else RelativeChunks(ranks=ranks, group=group)
        self._first = 0 if is_broadcast else 1  # the own shard is there
        self._started: dict[int, fx.Node] = {}

    def write(self) -> None:
        for one in self._gather.products:
            for other in one.others:
                hoist(other, self._anchor)
        call = self._calls(self._anchor, self._gather.node.meta)
        for step in range(self._first, min(self._first + self._options.depth, self._gather.ranks)):
            self._start(self._calls(self._gather.node), step, self._gather.shard)
        parts: list[list[fx.Node]] = [[] for _ in self._gather.products]
        for step in range(self._gather.ranks):
            shard = self._gather.shard
            if step >= self._first:
                shard = call(collectives.WAIT, self._started[step])
                self._start(call, step + self._options.depth, shard)
            self._multiply(step, shard, parts)
        for one, found in zip(self._gather.products, parts, strict=True):
            self._replace(one, found)
        self._erase()

    def _start(self, call: Calls, step: int, received: fx.Node) -> None:
        gather = self._gather
        if step >= gather.ranks:
            return
        if self._options.order == "broadcast":
            self._started[step] = call(collectives.BROADCAST, gather.shard, step, gather.group)
        elif self._options.order == "cyclic":
            self._started[step] = call(SHARD_PERMUTE, received, 1, gather.group)
        else:
            self._started[step] = call(SHARD_PERMUTE, gather.shard, step, gather.group)

    def _multiply(self, step: int, shard: fx.Node, parts: list[list[fx.Node]]) -> None:
        made = {self._gather.node: shard}
        for one, found in zip(self._gather.products, parts, strict=True):
            call = self._calls(self._anchor, one.product.node.meta)
            operand = self._part(call, one.product.operand(one.side), made)
            found.append(one.part(call, operand, partial(self._chunk, step=step)))
            found[-1].meta[PARTIAL] = True

    def _chunk(self, call: Calls, node: fx.Node, cut: Cut, *, step: int) -> fx.Node:
        return self._chunks.chunk(call, node, cut, step)

    def _part(self, call: Calls, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """One rank's part of a value that was made of the gathered one by moves."""
        if node not in made:
            (source,) = node.all_input_nodes
            made[node] = move_part(call, node, self._part(call, source, made), self._gather.cuts[node])
        return made[node]

    def _replace(self, one: CutProduct, parts: list[fx.Node]) -> None:
        node = one.product.node
        call = self._calls(self._anchor, node.meta)
        if one.kind == "contracting":
            whole = one.finished(call, self._chunks.added(call, parts))
        else:
            whole = self._chunks.joined(call, parts, one.result_cut)
        old, new = node.meta["val"], whole.meta["val"]
        assert (old.shape, old.dtype) == (new.shape, new.dtype), f"{node.name} became another value"
        node.replace_all_uses_with(whole)

    def _erase(self) -> None:
        graph = self._gather.node.graph
        for one in self._gather.products:
            graph.erase_node(one.product.node)
        for node in sorted(self._gather.cuts, reverse=True):  # nodes compare by their place in the graph
            graph.erase_node(node)
