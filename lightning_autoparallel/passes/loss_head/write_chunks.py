"""A region's calls, written once per chunk of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.passes.decompose.cuts import RESHAPES, Cut
from lightning_autoparallel.passes.decompose.product_parts import Product, cast, is_narrow, product_of
from lightning_autoparallel.passes.loss_head.head_region import HeadRegion
from lightning_autoparallel.torch_compat.rank_operators import ADD_PRODUCT, WIDE_PRODUCT

aten = torch.ops.aten


def write_chunks(region: HeadRegion, given: Mapping[fx.Node, fx.Node], call: Calls) -> dict[fx.Node, fx.Node]:
    """The whole values of the region's exits, from calls that are added; ``given`` stands for what it would read.

    Where ranks reduce something of a chunk, the next chunk begins meanwhile; else one is done before the next begins.
    Rows are put together again; sums over rows are added up as they come, in float32 where they are narrower, and
    rounded once.
    """
    stages = _stages(region)
    chunks = [_Chunk(region, index, given, call) for index in range(region.chunks)]
    parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.exits()}
    for index, stage in _turns(region.chunks, 1 + max(stages.values())):
        for node in (node for node in region.calls if stages[node] == stage):
            if node in parts:
                parts[node] = chunks[index].write_part(node, parts[node])
            else:
                chunks[index].write(node)
    return {node: _whole(node, region.calls[node].result, parts[node], call) for node in parts}


def _stages(region: HeadRegion) -> dict[fx.Node, int]:
    """How many waits for reductions must be behind a chunk where a call of it runs, which is as late as it can be."""
    behind: dict[fx.Node, int] = {}  # waits between a call and the end of its chunk
    for node in reversed(region.calls):
        readers = [user for user in node.users if user in region.calls]
        behind[node] = max((behind[user] + fxn.is_wait(user) for user in readers), default=0)
    most = max(behind.values())
    return {node: most - waits for node, waits in behind.items()}


def _turns(chunks: int, stages: int) -> Iterator[tuple[int, int]]:
    """In which order the stages of chunks run: the first half of one chunk's between the second half of the last's."""
    half = (stages + 1) // 2
    for index in range(chunks + 1):
        for stage in range(half):
            if index < chunks:
                yield index, stage
            if index > 0 and half + stage < stages:
                yield index - 1, half + stage


class _Chunk:
    """Writes the calls of one chunk."""

    def __init__(self, region: HeadRegion, index: int, given: Mapping[fx.Node, fx.Node], call: Calls) -> None:
        self._region, self._index, self._given, self._call = region, index, given, call
        self._rows: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self._made: dict[fx.Node, fx.Node] = {}

    def write(self, node: fx.Node) -> fx.Node:
        """The call on this chunk's rows; what it reads of the region is written already."""
        operands = {operand: self._operand(node, operand) for operand in self._region.calls[node].operands}
        self._made[node] = self._written(node, self._region.calls[node].result, operands)
        return self._made[node]

    def write_part(self, node: fx.Node, before: Sequence[fx.Node]) -> list[fx.Node]:
        """The call of an exit, with what chunks ``before`` have made of it: their rows, or the one sum of those."""
        if self._region.calls[node].result is None:
            return [self._write_added(node, before)]
        return [*before, self.write(node)]

    def _write_added(self, node: fx.Node, total: Sequence[fx.Node]) -> fx.Node:
        """The call, which sums this chunk's rows up, added to the ``total`` of chunks before if there were any."""
        product = product_of(node)
        if not total:
            return self.write(node)
        if product is not None and _is_alone(product):
            operands = [self._operand(node, operand) for operand in (product.left, product.right)]
            return self._beside(node)(ADD_PRODUCT, *operands, *total)
        made = self.write(node)
        return self._beside(made)(aten.add.Tensor, *total, made)

    def _operand(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        cut = self._region.calls[node].operands[operand]
        return self._made[operand] if operand in self._made else self._entry(operand, cut)

    def _beside(self, node: fx.Node) -> Calls:
        """Adds calls of the same place in the user's code."""
        return Calls(self._call.anchor, _meta(node), self._call.results)

    def _written(self, node: fx.Node, cut: Cut | None, operands: Mapping[fx.Node, fx.Node]) -> fx.Node:
        call = self._beside(node)
        if cut is None:
            return _addend(call, node, operands)
        shape = cut.part_of(node.meta["val"].shape)
        if node.target in RESHAPES:
            return call.view(operands[node.all_input_nodes[0]], shape)
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        if node.target in (aten.expand.default, aten.slice_backward.default):
            args = (args[0], shape, *args[2:])
        if node.target is aten.full.default:
            args = (shape, *args[1:])
        return call(node.target, *args, **kwargs)

    def _entry(self, operand: fx.Node, cut: Cut | None) -> fx.Node:
        source = self._given.get(operand, operand)
        if cut is None:
            return source
        if (operand, cut) not in self._rows:
            self._rows[operand, cut] = self._taken(source, cut)
        return self._rows[operand, cut]

    def _taken(self, source: fx.Node, cut: Cut) -> fx.Node:
        """This chunk's rows of a whole value."""
        call = self._beside(source)
        shape = list(source.meta["val"].shape)
        start = self._index * cut.inner
        if cut.outer == 1:
            return call(aten.slice.Tensor, source, cut.dim, start, start + cut.inner)
        spread = call.view(source, cut.spread(shape, self._region.chunks * cut.inner))
        rows = call(aten.slice.Tensor, spread, cut.dim + 1, start, start + cut.inner)
        return call.view(rows, cut.part_of(shape))


def _meta(node: fx.Node) -> dict[str, Any]:
    """Where in the user's code the call is; a chunk's gradient is computed beside its loss."""
    return {key: value for key, value in node.meta.items() if key != "partitioner_tag"}


def _is_alone(product: Product) -> bool:
    """Whether it is one product of two matrices and nothing else."""
    return product.bias is None and not product.is_batch


def _addend(call: Calls, node: fx.Node, operands: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What one chunk adds to a sum over rows: not yet rounded."""
    product, dtype = product_of(node), node.meta["val"].dtype
    if product is not None and is_narrow(dtype):
        return call(WIDE_PRODUCT, operands[product.left], operands[product.right])
    args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
    if product is None and is_narrow(dtype):
        kwargs = {**kwargs, "dtype": torch.float32}
    return call(node.target, *args, **kwargs)


def _whole(node: fx.Node, cut: Cut | None, parts: list[fx.Node], call: Calls) -> fx.Node:
    """The value that the chunks' parts make together."""
    call = Calls(call.anchor, _meta(node), call.results)
    value: Tensor = node.meta["val"]
    if cut is None:
        return cast(call, parts[0], value.dtype)
    if cut.outer == 1:
        return call(aten.cat.default, parts, cut.dim)
    spread = [call.view(part, cut.spread(cut.part_of(value.shape), cut.inner)) for part in parts]
    return call.view(call(aten.cat.default, spread, cut.dim + 1), list(value.shape))
