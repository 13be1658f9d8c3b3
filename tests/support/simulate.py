"""One operator, run by every rank of one axis on its own part of the inputs, against the operator on full tensors."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.contracts import NodePlacement, PlanAxis, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.hand_made import as_captured
from tests.support.lockstep import one_group, run_lockstep
from tests.support.placements import cut, joined


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


def axis_of(size: int, rank: int = 0) -> PlanAxis:
    """The one axis of a simulation."""
    return PlanAxis(mesh_axes=("dp_shard",), size=size, rank=rank, group_name="0")


def run_on_ranks(node: fx.Node, row: Candidate, size: int) -> list[list[Tensor]]:
    """The results of every rank: the node lowered as one of a plan, run on cut inputs in lockstep."""
    tensors = [argument.meta["val"] for argument in fxn.tensor_arguments(node)]
    per_input = [cut(tensor, placement, size) for tensor, placement in zip(tensors, row.inputs, strict=True)]
    graphs = [_lowered(node, row, axis_of(size, rank)) for rank in range(size)]
    inputs = [[parts[rank] for parts in per_input] for rank in range(size)]
    results = run_lockstep(graphs, inputs, one_group("0", size))
    count = len(fxn.values(node))
    present = [index for index, value in enumerate(fxn.values(node)) if value is not None]
    padded: list[list[Any]] = [[None] * count for _ in results]
    for rank, result in enumerate(results):
        for index, value in zip(present, result, strict=True):
            padded[rank][index] = value
    return padded


def _lowered(node: fx.Node, row: Candidate, axis: PlanAxis) -> fx.Graph:
    graph, mode = fx.Graph(), FakeTensorMode()

    def placeholder(argument: fx.Node) -> fx.Node:
        copied = graph.placeholder(f"x_{len(graph.nodes)}")
        copied.meta["val"] = mode.from_tensor(argument.meta["val"])
        return copied

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), placeholder)
    call = graph.create_node("call_function", node.target, args, kwargs)
    call.meta["val"] = tree_map_only(Tensor, mode.from_tensor, node.meta["val"])
    placements = {p.name: NodePlacement(inputs=(), outputs=((placement,),)) for p, placement in _inputs(graph, row)}
    outputs = tuple(None if placement is None else (placement,) for placement in row.outputs)
    placements[call.name] = NodePlacement(inputs=tuple((placement,) for placement in row.inputs), outputs=outputs)
    results, ends = [call], [outputs[0]]
    if isinstance(node.meta["val"], (tuple, list)):
        results, ends = [], []
        for index, value in enumerate(call.meta["val"]):
            if isinstance(value, Tensor):
                item = graph.call_function(operator.getitem, (call, index))
                item.meta["val"] = value
                placements[item.name] = NodePlacement(inputs=(), outputs=(outputs[index],))
                results.append(item)
                ends.append(outputs[index])
    graph.output(results)
    plan = ShardingPlan(name="row", axes=(axis,), nodes=placements, parameters={}, outputs=tuple(ends))
    return lower_graph(as_captured(graph, len(results)), plan).graph_module.graph


def _inputs(graph: fx.Graph, row: Candidate) -> list[tuple[fx.Node, Placement]]:
    return list(zip(graph.find_nodes(op="placeholder"), row.inputs, strict=True))


def recombined(results: list[list[Tensor]], node: fx.Node, row: Candidate) -> list[tuple[Tensor, Tensor]]:
    """(what the ranks made together, what one device makes) for every tensor result."""
    pairs = []
    for index, (full, placement) in enumerate(zip(fxn.values(node), row.outputs, strict=True)):
        if full is not None:
            assert placement is not None
            pairs.append((joined([result[index] for result in results], placement, full.shape), full))
    return pairs
