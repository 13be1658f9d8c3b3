"""A product that is scattered, written as transfers between which what goes to the next rank is computed."""

from __future__ import annotations

import math
from functools import partial, reduce

import torch
from torch import fx

from lightning_autoparallel.fx.added_calls import Calls, FakeResults
from lightning_autoparallel.passes.decompose.chunks import RelativeChunks
from lightning_autoparallel.passes.decompose.cuts import Cut, move_part
from lightning_autoparallel.passes.decompose.gathers import PARTIAL
from lightning_autoparallel.passes.decompose.options import DecomposeOptions
from lightning_autoparallel.passes.decompose.product_parts import Product, bias_part, cast, is_narrow, product_of
from lightning_autoparallel.passes.decompose.scatters import Scatter
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.rank_operators import SHARD_PERMUTE

aten = torch.ops.aten


def write_scatter(scatter: Scatter, options: DecomposeOptions, results: FakeResults | None = None) -> None:
    """Replace the reduce-scatter by transfers of what the parts of its products give."""
    writer = _Writer(scatter, options, results or FakeResults())
    total = writer.passed_on() if options.order == "cyclic" else writer.sent_straight()
    writer.replace(total)


class _Writer:
    def __init__(self, scatter: Scatter, options: DecomposeOptions, results: FakeResults) -> None:
        self._calls = partial(Calls, results=results)
        self._scatter, self._depth = scatter, options.depth
        self._chunks = RelativeChunks(ranks=scatter.ranks, group=scatter.group)
        self._call = self._calls(scatter.node)
        self._end = self._calls(min(scatter.waits), scatter.node.meta)  # nodes compare by their place in the graph

    def sent_straight(self) -> fx.Node:
        """Every rank computes what goes to each other one and sends it there; its own part is the last."""
        ranks = self._scatter.ranks
        started: list[fx.Node] = []
        received: list[fx.Node] = []
        for step in range(1, ranks):
            part = self._part(step)
            if len(started) >= self._depth:
                received.append(self._call(collectives.WAIT, started.pop(0)))
            started.append(self._call(SHARD_PERMUTE, part, ranks - step, self._scatter.group))
        own = self._part(0)
        received += [self._end(collectives.WAIT, transfer) for transfer in started]
        return self._added([own, *received])

    def passed_on(self) -> fx.Node:
        """What goes to a rank passes all others, each of which adds its part: the next one computes it meanwhile."""
        total = self._part(1)
        for step in range(1, self._scatter.ranks):
            transfer = self._call(SHARD_PERMUTE, total, 1, self._scatter.group)
            own = self._part((step + 1) % self._scatter.ranks)
            call = self._end if step == self._scatter.ranks - 1 else self._call
            total = _sum(call, [own, call(collectives.WAIT, transfer)])
        return total

    def replace(self, total: fx.Node) -> None:
        """Let the readers of what was waited for read ``total``."""
        node = self._scatter.node
        if self._scatter.averages:
            total = self._end(aten.div.Tensor, total, self._scatter.ranks)
        total = cast(self._end, total, node.meta["val"].dtype)
        assert total.meta["val"].shape == node.meta["val"].shape, f"{node.name} became another value"
        graph = node.graph
        for wait in self._scatter.waits:
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
        graph.erase_node(node)
        for inside in sorted(self._scatter.cuts, reverse=True):
            graph.erase_node(inside)

    def _added(self, parts: list[fx.Node]) -> fx.Node:
        if is_narrow(parts[0].meta["val"].dtype):
            parts = [cast(self._end, part, torch.float32) for part in parts]
        return _sum(self._end, parts)

    def _part(self, step: int) -> fx.Node:
        """What the rank ``step`` further on is to have of this rank's value, row by row."""
        made: dict[fx.Node, fx.Node] = {}
        for node in sorted(self._scatter.cuts):  # nodes compare by their place in the graph
            made[node] = self._part_of(node, made, step)
        return self._call.contiguous(made[self._scatter.scattered])

    def _part_of(self, node: fx.Node, made: dict[fx.Node, fx.Node], step: int) -> fx.Node:
        cut, call = self._scatter.cuts[node], self._calls(self._scatter.node, node.meta)
        product = product_of(node)
        if product is not None:
            part = _product_part(call, product, cut, self._chunks, step)
            part.meta[PARTIAL] = True
            return part
        parts = [made[source] for source in node.all_input_nodes]
        return call(aten.add.Tensor, *parts) if len(parts) > 1 else move_part(call, node, parts[0], cut)


def _sum(call: Calls, parts: list[fx.Node]) -> fx.Node:
    """The sum of parts of one shape.

    Added as rows of numbers: compilers make one call of a product and a sum of its shape, and the own product, which
    should run beside the last transfer, would wait for it.
    """
    shape = list(parts[0].meta["val"].shape)
    rows = [call.view(part, [math.prod(shape)]) for part in parts]
    return call.view(reduce(lambda total, row: call(aten.add.Tensor, total, row), rows), shape)


def _product_part(call: Calls, product: Product, cut: Cut, chunks: RelativeChunks, step: int) -> fx.Node:
    """The rows, columns or batches of a product that ``cut`` gives to the rank ``step`` further on."""
    chunk = partial(chunks.chunk, step=step)
    left, right, bias = product.left, product.right, product.bias
    last = product.node.meta["val"].dim() - 1
    if cut.dim == last:
        right = chunk(call, right, cut)
    else:
        left = chunk(call, left, cut)
        if product.is_batch and cut.dim == 0:
            right = chunk(call, right, cut)
    if bias is None:
        return call(product.node.target, left, right)
    return call(product.node.target, bias_part(call, product, cut, chunk), left, right)
