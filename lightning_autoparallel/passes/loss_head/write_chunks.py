"""A region's calls, written once per chunk of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.passes.decompose.cuts import RESHAPES, Cut
from lightning_autoparallel.passes.decompose.product_parts import cast, is_narrow, product_of
from lightning_autoparallel.passes.loss_head.head_region import HeadRegion
from lightning_autoparallel.passes.loss_head.row_rules import RowCall
from lightning_autoparallel.torch_compat.rank_operators import WIDE_PRODUCT

aten = torch.ops.aten


def write_chunks(region: HeadRegion, given: Mapping[fx.Node, fx.Node], call: Calls) -> dict[fx.Node, fx.Node]:
    """The whole values of the region's exits, from calls that are added; ``given`` stands for what it would read.

    One chunk is done before the next one begins. Rows are put together again; sums over rows are added up, in float32
    where they are narrower, and rounded once.
    """
    exits = region.exits()
    parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in exits}
    for index in range(region.chunks):
        chunk = _Chunk(region, index, given, call)
        made: dict[fx.Node, fx.Node] = {}
        for node, row_call in region.calls.items():
            made[node] = chunk.written(node, row_call, made)
        for node in exits:
            total = parts[node]
            if total and region.calls[node].result is None:
                total[:] = [call(aten.add.Tensor, total[0], made[node])]
            else:
                total.append(made[node])
    return {node: _whole(node, region.calls[node].result, parts[node], call) for node in exits}


class _Chunk:
    """Writes the calls of one chunk."""

    def __init__(self, region: HeadRegion, index: int, given: Mapping[fx.Node, fx.Node], call: Calls) -> None:
        self._chunks, self._index, self._given, self._call = region.chunks, index, given, call
        self._rows: dict[tuple[fx.Node, Cut], fx.Node] = {}

    def written(self, node: fx.Node, row_call: RowCall, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The call on this chunk's rows, whose arguments of the region are ``made``."""
        operands = {
            operand: made[operand] if operand in made else self._entry(operand, cut)
            for operand, cut in row_call.operands.items()
        }
        call = Calls(self._call.anchor, _meta(node), self._call.results)
        if row_call.result is None:
            return _addend(call, node, operands)
        shape = row_call.result.part_of(node.meta["val"].shape)
        if node.target in RESHAPES:
            return call.view(operands[node.all_input_nodes[0]], shape)
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        if node.target is aten.expand.default:
            args = (args[0], shape)
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
        call = Calls(self._call.anchor, _meta(source), self._call.results)
        shape = list(source.meta["val"].shape)
        start = self._index * cut.inner
        if cut.outer == 1:
            return call(aten.slice.Tensor, source, cut.dim, start, start + cut.inner)
        spread = call.view(source, cut.spread(shape, self._chunks * cut.inner))
        rows = call(aten.slice.Tensor, spread, cut.dim + 1, start, start + cut.inner)
        return call.view(rows, cut.part_of(shape))


def _meta(node: fx.Node) -> dict[str, Any]:
    """Where in the user's code the call is; a chunk's gradient is computed beside its loss."""
    return {key: value for key, value in node.meta.items() if key != "partitioner_tag"}


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
