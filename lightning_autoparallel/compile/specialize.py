"""``specialize``: the graph of all ranks becomes that of one, the last thing that is done before it is lowered.

Until then no text tells ranks apart, so that graphs can be compared. Here what depends on the rank is written with
torch's own operators, which compilers know: a transfer is an all-to-all of which one piece each way is not empty (on
NCCL one send and one receive in a group), parts are joined and added in the order of ranks. Products that are added to
a sum which nothing else reads are added where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.fx.in_place import adds_in_place
from lightning_autoparallel.torch_compat import rank_operators as ranked
from lightning_autoparallel.torch_compat.collectives import ALL_TO_ALL
from lightning_autoparallel.torch_compat.graph_modules import graph_module

aten = torch.ops.aten

PlaceOf = Callable[[str], tuple[int, int]]  # process group name -> this process's rank in it, and its ranks
_Write = Callable[[fx.Node, Calls, PlaceOf], fx.Node]


def specialize_partitioned(partitioned: PartitionedGraph, place_of: PlaceOf) -> PartitionedGraph:
    """Both halves as one rank runs them; the given graphs stay as they are."""
    backward = partitioned.backward
    return replace(
        partitioned,
        forward=_specialized(partitioned.forward, place_of),
        backward=None if backward is None else _specialized(backward, place_of),
    )


def _specialized(given: fx.GraphModule, place_of: PlaceOf) -> fx.GraphModule:
    if not any(node.target in _WRITERS for node in given.graph.nodes):
        return given
    graph = fx.Graph()
    graph.output(graph.graph_copy(given.graph, {}))
    specialize(graph, place_of)
    return graph_module(given, graph)


def specialize(graph: fx.Graph, place_of: PlaceOf) -> None:
    """Write what depends on the rank as the calls of the rank that ``place_of`` tells, in place.

    Raises:
        PassError: a call that the ranks of its group could not make together.
    """
    for node in [node for node in graph.nodes if adds_in_place(node)]:
        _add_in_place(node)
    for node in list(graph.nodes):
        write = _WRITERS.get(node.target)
        if write is not None:
            node.replace_all_uses_with(write(node, Calls(node), place_of))
            graph.erase_node(node)
    graph.lint()


def _add_in_place(node: fx.Node) -> None:
    """What reads the sum reads the memory that it was added to: nothing else does, before or after."""
    *_, total = node.args
    assert isinstance(total, fx.Node)
    Calls(node)(ranked.ADD_PRODUCT_IN_PLACE, *node.args)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)


def _transfer(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    x, shift, group = node.args
    assert isinstance(x, fx.Node) and isinstance(shift, int)
    rank, ranks = place_of(str(group))
    _check_transfer(node, x.meta["val"], shift, ranks)
    received, sent = ranked.permute_splits(int(x.meta["val"].shape[0]), shift, rank, ranks)
    return call(ALL_TO_ALL, x, received, sent, group)


def _check_transfer(node: fx.Node, sent: Tensor, shift: int, ranks: int) -> None:
    """Refuse splits that do not meet: gloo ends the process over them, and NCCL hangs.

    Raises:
        PassError: rows of unknown number, a tensor that is not row-major, or one that would be sent to itself.
    """
    problem = None
    if not sent.dim() or not all(type(size) is int for size in sent.shape):
        problem = f"its shape {tuple(sent.shape)} has no fixed number of rows"
    elif not sent.is_contiguous():
        problem = f"what it sends has strides {sent.stride()}, not those of rows"
    elif shift % ranks == 0:
        problem = f"a shift of {shift} among {ranks} ranks sends to nobody else"
    if problem is not None:
        raise PassError(f"{fxn.describe(node)} cannot be lowered to a send and a receive: {problem}")


def _cat(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    parts, dim, group = node.args
    return call(aten.cat.default, _in_order(node, parts, group, place_of), dim)


def _sum(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    parts, group = node.args
    ordered = _in_order(node, parts, group, place_of)
    return reduce(lambda total, part: call(aten.add.Tensor, total, part), ordered)


def _in_order(node: fx.Node, parts: Any, group: Any, place_of: PlaceOf) -> list[Any]:
    rank, ranks = place_of(str(group))
    if len(parts) != ranks:
        raise PassError(f"{fxn.describe(node)} has {len(parts)} parts on a group of {ranks} ranks")
    return ranked.by_rank(parts, rank)


def _chunk(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    x, dim, shift, ranks, group = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int) and isinstance(shift, int)
    rank, there = place_of(str(group))
    size = int(x.meta["val"].shape[dim])
    if ranks != there or size % there:
        raise PassError(f"{fxn.describe(node)} cuts {size} rows into {ranks} chunks on a group of {there} ranks")
    start = (rank + shift) % there * (size // there)
    return call(aten.slice.Tensor, x, dim, start, start + size // there)


def _wide(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    return _product(call, *node.args)


def _added(node: fx.Node, call: Calls, place_of: PlaceOf) -> fx.Node:
    left, right, total = node.args
    assert isinstance(total, fx.Node) and isinstance(left, fx.Node)
    is_wide = total.meta["val"].dtype != left.meta["val"].dtype
    return call(aten.add.Tensor, total, _product(call, left, right) if is_wide else call(aten.mm.default, left, right))


def _product(call: Calls, left: Any, right: Any) -> fx.Node:
    """In float32, whatever its operands are."""
    product = aten.bmm if left.meta["val"].dim() == 3 else aten.mm
    if ranked.wide_products(left.meta["val"].device.type):
        return call(product.dtype, left, right, torch.float32)
    widened = [call(aten._to_copy.default, operand, dtype=torch.float32) for operand in (left, right)]
    return call(product.default, *widened)


_WRITERS: dict[Any, _Write] = {
    ranked.SHARD_PERMUTE: _transfer,
    ranked.RANK_CAT: _cat,
    ranked.RANK_SUM: _sum,
    ranked.RANK_CHUNK: _chunk,
    ranked.WIDE_PRODUCT: _wide,
    ranked.ADD_PRODUCT: _added,
}
