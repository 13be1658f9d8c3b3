"""One operator, run by every rank of one axis on its own part of the inputs, against the operator on full tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from lightning_autoparallel.apply.lower import _SHAPE_ARGUMENT
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import local_shape
from lightning_autoparallel.plan.candidates import Candidate
from tests.placements import cut, joined


def node_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A call in a graph of its own; the values in it are the real tensors."""
    graph = fx.Graph()

    def placeholder(value: Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(op, *tree_map_only(Tensor, placeholder, (args, kwargs)))
    node.meta["val"] = op(*args, **kwargs)
    return node


def run_on_ranks(node: fx.Node, row: Candidate, size: int) -> list[list[Tensor]]:
    """The results of every rank, its inputs cut and its shape argument localised as lowering does."""
    tensors = [argument.meta["val"] for argument in fxn.tensor_arguments(node)]
    per_input = [cut(tensor, placement, size) for tensor, placement in zip(tensors, row.inputs, strict=True)]
    results = []
    for rank in range(size):
        mine = iter(parts[rank] for parts in per_input)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _, mine=mine: next(mine))
        args = _localised(node, tuple(args), row.outputs[0], size)
        value = node.target(*args, **kwargs)
        results.append(list(value) if isinstance(value, (tuple, list)) else [value])
    return results


def _localised(node: fx.Node, args: tuple[Any, ...], placement: Placement | None, size: int) -> tuple[Any, ...]:
    position = _SHAPE_ARGUMENT.get(node.target)
    if position is None:
        return args
    assert placement is not None
    axis = PlanAxis(mesh_axes=("dp_shard",), size=size, rank=0, group_name="0")
    shape = local_shape(node.meta["val"].shape, (placement,), [axis])
    if node.target is torch.ops.aten.view.default:
        args = (args[0].contiguous(), *args[1:])
    return (*args[:position], shape, *args[position + 1 :])


def recombined(results: list[list[Tensor]], node: fx.Node, row: Candidate) -> list[tuple[Tensor, Tensor]]:
    """(what the ranks made together, what one device makes) for every tensor result."""
    pairs = []
    for index, (full, placement) in enumerate(zip(fxn.values(node), row.outputs, strict=True)):
        if full is not None:
            assert placement is not None
            pairs.append((joined([result[index] for result in results], placement, full.shape), full))
    return pairs
