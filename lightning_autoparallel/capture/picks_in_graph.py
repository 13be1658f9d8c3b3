"""Whether a step might take whole numbers of its batch for positions of rows: what its graph alone says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.capture.batch import BatchLeaf
from lightning_autoparallel.capture.growth_rules import is_view, name_of
from lightning_autoparallel.capture.picked_rows import (
    COMPARED,
    FOUND,
    FOUND_ANYWHERE,
    NO_POSITIONS,
    dim_of,
    is_by_element,
    may_hold,
    picks,
)
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.block_operators import BLOCK
from lightning_autoparallel.torch_compat.dispatch import OpOverload
from lightning_autoparallel.torch_compat.tracing import JointExport


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


def may_pick_rows(graph: fx.Graph, held: Collection[fx.Node], state: Collection[fx.Node]) -> bool:
    """Whether the forward might use whole numbers of the batch, the placeholders ``held``, as positions among rows.

    This asks no second run: no along dims that come from ``state``, as those of tables and classes do.
    """
    carried, found = set(held), set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or fxn.is_backward(node):
            continue
        if not isinstance(node.target, OpOverload):
            carried |= {node} if not carried.isdisjoint(node.all_input_nodes) else set()
            found |= {node} if not found.isdisjoint(node.all_input_nodes) else set()
            continue
        called = name_of(node.target)
        if called in FOUND or called in FOUND_ANYWHERE or called == "arange":
            found |= set() if _is_found_in_state(node, state) else {node}
        elif not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        if carried.isdisjoint(node.all_input_nodes):
            continue
        if node.target is BLOCK or (called in COMPARED and not found.isdisjoint(node.all_input_nodes)):
            return True  # whatever a block does with it
        for tensor, dim, index in picks(called, node.args):
            if index in carried and (dim is None or not _is_of_state(tensor, dim, state)):
                return True
        is_whole = any(value is not None and may_hold(value.dtype) for value in fxn.values(node))
        if called not in NO_POSITIONS and (is_whole or is_by_element(node.target)):
            carried.add(node)
    return False


def _is_found_in_state(node: fx.Node, state: Collection[fx.Node]) -> bool:
    """Whether positions are among classes, say, not among rows."""
    operator: Any = node.target
    dim = dim_of(operator, node.args, node.kwargs) if name_of(operator) in FOUND else None
    return dim is not None and _is_of_state(node.args[0], dim, state)  # type: ignore[arg-type]


def _is_of_state(node: fx.Node, dim: int, state: Collection[fx.Node]) -> bool:
    """Whether a dim is one of a parameter or buffer, which values have by products with it."""
    while node not in state:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return False
        called, args, shape = name_of(node.target), node.args, _shape(node)
        dim %= max(len(shape), 1)
        if called == "cat":
            return all(_is_of_state(each, dim, state) for each in args[0])  # type: ignore
        first = args[0] if args else None
        is_last, given = dim == len(shape) - 1, _shape(first) if isinstance(first, fx.Node) else ()
        if called in ("mm", "bmm", "addmm") and is_last:
            node = args[2 if called == "addmm" else 1]  # type: ignore[assignment]
        elif called == "convolution" and dim == 1:
            node, dim = args[1], 1 if args[6] else 0  # type: ignore[assignment]
        elif called in ("t", "transpose", "permute"):
            node, dim = first, _dim_before(called, args, dim, len(shape))  # type: ignore[assignment]
        elif given and (given == shape or _keeps(called, node, given, shape, dim)):
            node = first  # type: ignore[assignment]
        elif given and is_last and given[-1] == shape[-1]:
            node, dim = first, len(given) - 1  # type: ignore[assignment]
        else:
            return False
    return True


def _keeps(called: str, node: fx.Node, given: tuple[int, ...], shape: tuple[int, ...], dim: int) -> bool:
    """Whether a view, or a cut of other dims, has the dim where it was."""
    if called == "slice":
        return given[dim] == shape[dim]
    return is_view(node.target) and given[: dim + 1] == shape[: dim + 1]


def _dim_before(called: str, args: Any, dim: int, dims: int) -> int:
    """Where a dim was before dims changed places."""
    if called == "permute":
        return int(args[1][dim]) % dims
    swapped = [each % dims for each in args[1:3]] if called == "transpose" else [0, 1]
    return swapped[1 - swapped.index(dim)] if dim in swapped else dim


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = fxn.values(node)[0]
    return () if value is None else tuple(value.shape)
