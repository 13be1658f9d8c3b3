"""What a loss computes with the widest value of a step: the region that can be computed chunk by chunk of its rows.

It starts at a product, and holds every call that reads, or makes, values as wide as its result, with what lies between
those calls. All of them must compute rows from the same rows: then only rows, and sums over rows, leave the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.cuts import Cut
from lightning_autoparallel.passes.decompose.product_parts import Product, product_of
from lightning_autoparallel.passes.loss_head.row_rules import RowCall, from_operand, from_result


class NotChunkable(Exception):
    """Why a head stays whole."""


@dataclass(frozen=True, kw_only=True)
class HeadRegion:
    """Calls in order, by rows, in so many ``chunks``; ``product`` is where it begins."""

    product: fx.Node
    chunks: int
    calls: dict[fx.Node, RowCall]

    def entries(self) -> dict[fx.Node, set[Cut | None]]:
        """What the region reads from outside, and which rows of it; None: all."""
        found: dict[fx.Node, set[Cut | None]] = {}
        for call in self.calls.values():
            for operand, cut in call.operands.items():
                if operand not in self.calls:
                    found.setdefault(operand, set()).add(cut)
        return found

    def exits(self) -> list[fx.Node]:
        """The calls whose results are read outside of it."""
        return [node for node in self.calls if any(user not in self.calls for user in node.users)]


def find_region(graph: fx.Graph, product: fx.Node, chunks: int) -> HeadRegion:
    """The region that begins at ``product``, in ``chunks`` chunks of its rows.

    Raises:
        NotChunkable: there is none, with the reason.
    """
    reason = NotChunkable("it is no product of matrices")
    for cut in _starts(product, chunks):
        try:
            return _Growth(graph, product, chunks).grown(cut)
        except NotChunkable as caught:
            reason = caught
    raise reason


def _starts(node: fx.Node, chunks: int) -> Iterator[Cut]:
    """Rows in order, then every n-th run of them: batches of sequences are cut in each sequence alike."""
    if _head(node) is None:
        return
    rows = int(node.meta["val"].shape[0])
    outers = {1: None}
    for user in _shown(node):
        shape = user.meta["val"].shape
        if len(shape) > 2:
            outers[int(shape[0])] = None
    fitting = [outer for outer in outers if rows % (outer * chunks) == 0]
    if not fitting:
        raise NotChunkable(f"its {rows} rows are not {chunks} equal chunks")
    for outer in fitting:
        yield Cut(dim=0, outer=outer, inner=rows // (outer * chunks))


def _shown(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if fxn.is_view_of_all(user):
            yield user
            yield from _shown(user)


def _head(node: fx.Node) -> Product | None:
    """The product of two matrices whose result is as wide as neither of its rows' operand."""
    product = product_of(node)
    if product is None or product.is_batch:
        return None
    width, depth = node.meta["val"].shape[1], product.left.meta["val"].shape[1]
    sizes = (*node.meta["val"].shape, depth)
    return product if all(type(size) is int for size in sizes) and width != depth else None


@dataclass
class _Growth:
    graph: fx.Graph
    product: fx.Node
    chunks: int
    calls: dict[fx.Node, RowCall] = field(default_factory=dict)

    def grown(self, start: Cut) -> HeadRegion:
        call = from_result(self.product, start, self.chunks)
        if call is None:
            raise NotChunkable("one matrix is two operands of it")
        self.calls[self.product] = call
        pending = [self.product]
        while pending:
            node = pending.pop()
            pending += self._readers(node)
            pending += self._made_for(node)
        self._between()
        ordered = {node: self.calls[node] for node in self.graph.nodes if node in self.calls}
        region = HeadRegion(product=self.product, chunks=self.chunks, calls=ordered)
        self._check(region)
        return region

    def _is_wide(self, node: fx.Node, cut: Cut | None) -> bool:
        value, width = node.meta.get("val"), self.product.meta["val"].shape[1]
        if cut is None or not isinstance(value, Tensor):
            return False
        return any(size == width and dim != cut.dim for dim, size in enumerate(value.shape))

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """What reads a wide value, by its rows."""
        cut = self.calls[node].result
        if not self._is_wide(node, cut):
            return
        assert cut is not None
        for user in node.users:
            if user in self.calls:
                continue
            call = from_operand(user, node, cut, self.chunks)
            if call is None:
                raise NotChunkable(f"{_named(user)} reads {fxn.describe(node)} as a whole")
            self.calls[user] = call
            yield user

    def _made_for(self, node: fx.Node) -> Iterator[fx.Node]:
        """The wide values that a call of the region reads, if they are made row by row."""
        for operand, cut in self.calls[node].operands.items():
            if operand in self.calls or cut is None or not self._is_wide(operand, cut):
                continue
            call = from_result(operand, cut, self.chunks)
            if call is not None:
                self.calls[operand] = call
                yield operand

    def _between(self) -> None:
        """What stands between calls of the region, row by row as they are."""
        before = fxn.with_ancestors(self.calls) - set(self.calls)
        for node in self.graph.nodes:
            if node not in before:
                continue
            inside = [operand for operand in node.all_input_nodes if operand in self.calls]
            if not inside:
                continue
            cut = self.calls[inside[0]].result
            call = None if cut is None else from_operand(node, inside[0], cut, self.chunks)
            if call is None or call.result is None:
                raise NotChunkable(f"{_named(node)} needs all rows of {fxn.describe(inside[0])} before others are done")
            self.calls[node] = call

    def _check(self, region: HeadRegion) -> None:
        """Whether every call reads the rows that others make."""
        for node, call in region.calls.items():
            for operand, cut in call.operands.items():
                made = region.calls.get(operand)
                if made is not None and made.result is None:  # a chunk knows its own part of the sum only
                    raise NotChunkable(f"{_named(node)} needs the sum of all rows in {fxn.describe(operand)}")
                if made is not None and made.result != cut:
                    raise NotChunkable(f"{_named(node)} reads other rows of {fxn.describe(operand)} than are made")
        if not region.exits():
            raise NotChunkable("nothing reads what is made of it")
        if not all(isinstance(node.meta["val"], Tensor) for node in region.calls):
            raise NotChunkable("a call of it has several results")


def _named(node: fx.Node) -> str:
    return "the graph's result" if node.op == "output" else f"{node.target} ({fxn.describe(node)})"
