"""Whole numbers of a batch that a step takes for positions of rows: the place of a row's partner, its own number.

A collate function knows the rows of one rank's batch, from 0 on. A captured step has the rows of all ranks, where the
same number is the place of another row. What the step itself finds among all rows (``argsort``, ``arange``) is right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.capture.batch import BatchLeaf
from lightning_autoparallel.capture.growth import Call
from lightning_autoparallel.capture.growth_rules import is_view, name_of
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.block_operators import BLOCK
from lightning_autoparallel.torch_compat.dispatch import OpOverload
from lightning_autoparallel.torch_compat.tracing import JointExport
from lightning_autoparallel.torch_compat.tree import tree_leaves

Picked = tuple[Any, int | None, Any]  # of which tensor, along which dim or over all of it, what is the position

_AT_DIM = {  # tensor, dim and index
    *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"),
    *("index_add", "index_copy", "index_fill", "index_reduce"),
}
_AT_INDICES = {"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"}
_FOUND = {"arange", "argsort", "sort", "topk", "cumsum", "nonzero", "randperm", "unique_dim", "_unique2"}
_CARRIES = {
    *("_to_copy", "clone", "cat", "stack", "repeat", "flip", "roll", "where", "masked_fill", "constant_pad_nd"),
    *("index", "index_select", "gather", "masked_select", "add", "sub", "mul", "clamp", "clamp_min", "clamp_max"),
    *("maximum", "minimum", "copy", "lift_fresh_copy", "_unsafe_view", "floor_divide", "div"),
}


def whole_numbers(
    leaves: Sequence[BatchLeaf], arguments: Sequence[Tensor], first: int, export: JointExport
) -> dict[int, tuple[str, Tensor]]:
    """Those of the batch's rows, with their paths by identity, if they might be positions.

    ``arguments`` from the ``first`` on are the batch, those ahead of it parameters and buffers.
    """
    kinds, named = (torch.int32, torch.int64), enumerate(zip(leaves, arguments[first:], strict=True), first)
    found = {i: (leaf.path, value) for i, (leaf, value) in named if leaf.batched and value.dtype in kinds}
    placeholders = export.graph_module.graph.find_nodes(op="placeholder")
    nodes = {place: node for node, (kind, place) in zip(placeholders, export.inputs, strict=True) if kind == "argument"}
    held = [nodes[place] for place in found if place in nodes]
    state = {node for place, node in nodes.items() if place < first}
    may = may_pick_rows(export.graph_module.graph, held, state)
    return {id(value): (path, value) for path, value in found.values()} if may else {}


def check_picked_rows(
    name: str, line: str, once: Sequence[Call], twice: Sequence[Call], leaves: Mapping[int, tuple[str, Tensor]]
) -> None:
    """Whole numbers of the batch, ``leaves`` by the identity they have in the run ``once``, are no positions of rows.

    ``twice`` has the calls of a run on twice the rows, ``line`` is where the step begins.

    Raises:
        CaptureError: one is used as a position along a dim that grows with the rows.
    """
    if [call.operator for call in once] != [call.operator for call in twice]:
        return
    held = {identity: path for identity, (path, _) in leaves.items()}
    found: set[int] = set()  # positions among all rows
    for one, other in zip(once, twice, strict=True):
        if not isinstance(one.operator, OpOverload):
            continue
        called = name_of(one.operator)
        for (tensor, dim, index), (grown, *_) in zip(
            _picks(called, one.args), _picks(called, other.args), strict=False
        ):
            if id(index) in held and index.dtype != torch.bool and _grows(tensor, grown, dim):
                raise CaptureError(_refused(name, line, held[id(index)], called, tensor, dim))
        _follow(called, one, held, found)


def may_pick_rows(graph: fx.Graph, held: Collection[fx.Node], state: Collection[fx.Node]) -> bool:
    """Whether the forward might use whole numbers of the batch, the placeholders ``held``, as positions among rows.

    This asks no second run: no along dims that come from ``state``, as those of tables and classes do.
    """
    carried = set(held)
    for node in graph.nodes:
        if node.op != "call_function" or fxn.is_backward(node) or carried.isdisjoint(node.all_input_nodes):
            continue
        if node.target is BLOCK:
            return True  # whatever the block does with it
        if not isinstance(node.target, OpOverload):
            carried.add(node)
            continue
        called = name_of(node.target)
        for tensor, dim, index in _picks(called, node.args):
            if index in carried and (dim is None or not _is_of_state(tensor, dim, state)):
                return True
        if called in _CARRIES or is_view(node.target):
            carried.add(node)
    return False


def _is_of_state(node: fx.Node, dim: int, state: Collection[fx.Node]) -> bool:
    """Whether a dim is one of a parameter or buffer, which values have by products with it."""
    while node not in state:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return False
        called, args, size = name_of(node.target), node.args, _shape(node)[dim]
        dim %= len(_shape(node))
        is_last = dim == len(_shape(node)) - 1
        if called in ("mm", "bmm", "addmm") and is_last:
            node = args[2 if called == "addmm" else 1]  # type: ignore[assignment]
        elif called == "t":
            node, dim = args[0], 1 - dim  # type: ignore[assignment]
        elif called == "permute":
            node, dim = args[0], args[1][dim] % len(args[1])  # type: ignore
        else:
            first = args[0] if args else None
            cuts = called == "slice" and isinstance(first, fx.Node) and _shape(first)[dim] == size
            if not isinstance(first, fx.Node) or not (cuts or _shape(first) == _shape(node) or is_last):
                return False
            if is_last and _shape(first)[-1:] != (size,):
                return False
            node, dim = first, len(_shape(first)) - 1 if is_last else dim
    return True


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = fxn.values(node)[0]
    return () if value is None else tuple(value.shape)


def _follow(called: str, call: Call, held: dict[int, str], found: set[int]) -> None:
    """Results have what they were given."""
    results = [leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Tensor) and leaf.dtype != torch.bool]
    if called in _FOUND:
        found.update(map(id, results))
        return
    if called not in _CARRIES and not is_view(call.operator):
        return
    given = tree_leaves(call.args[:1] if called in ("index", "index_select", "gather") else (call.args, call.kwargs))
    if any(id(leaf) in found for leaf in given):
        found.update(map(id, results))
        return
    path = next((held[id(leaf)] for leaf in given if id(leaf) in held), None)
    if path is not None:
        held.update(dict.fromkeys(map(id, results), path))


def _picks(called: str, args: Sequence[Any]) -> Iterator[Picked]:
    """What a call takes for positions: tensors, or nodes of a graph."""
    if called in _AT_DIM and len(args) > 2:
        yield args[0], args[1], args[2]
    elif called in _AT_INDICES:
        yield from ((args[0], dim, index) for dim, index in enumerate(args[1]) if index is not None)
    elif called in ("take", "put"):
        yield args[0], None, args[1]
    elif called == "embedding":
        yield args[0], 0, args[1]
    elif called.startswith("_embedding_bag"):
        yield from ((args[0], 0, args[1]), (args[1], 0, args[2]))
    elif called.startswith("nll_loss") and "backward" not in called:
        dims = args[0].dim() if isinstance(args[0], Tensor) else len(_shape(args[0]))
        yield args[0], min(dims - 1, 1), args[1]


def _grows(tensor: Tensor, grown: Tensor, dim: int | None) -> bool:
    if dim is None:
        return grown.numel() > tensor.numel()
    return tensor.dim() > 0 and grown.shape[dim] > tensor.shape[dim]


def _refused(name: str, line: str, path: str, called: str, tensor: Tensor, dim: int | None) -> str:
    along = "all of it" if dim is None else f"dim {dim}"
    return (
        f"{line}: {name} takes whole numbers of the batch ('{path or 'batch'}') for positions along {along} of a "
        f"tensor of shape {list(tensor.shape)}, which grows with the rows ({called}): who makes a batch knows the rows "
        "of one rank only, and a captured step has those of all ranks; positions that the step makes itself "
        "(torch.arange) are right in both"
    )
