"""``eliminate_alias_round_trips``: what a rule moves to another placement is read where it was, by those who want that.

A rule pins a value at the edge of a module through an alias of the value. A reader that wants the placement which the
value had before the alias would have it moved there and back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.contracts import CapturedGraph, Placements, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.graph_modules import graph_module

_ALIAS = torch.ops.aten.alias.default

Reads = Mapping[tuple[fx.Node, int], fx.Node]  # (reader, which of its tensor arguments) -> what it reads instead


def eliminate_alias_round_trips(captured: CapturedGraph, plan: ShardingPlan) -> tuple[CapturedGraph, ShardingPlan, int]:
    """The graph and the plan without round trips, and how many reads were moved.

    A read of an alias becomes one of the value before it, or before several of them, where that lies as the reader
    wants it and the alias does not. Aliases that nobody reads leave graph and plan. What was given stays as it is.
    """
    stored = _stored(captured, plan)
    reads = _reads_before(captured.graph_module.graph, plan, stored)
    if not reads:
        return captured, plan, 0
    graph = _rewired(captured.graph_module.graph, reads)
    gone = _erase_unread(graph)
    module = graph_module(torch.nn.Module(), graph)
    nodes = {name: placement for name, placement in plan.nodes.items() if name not in gone}
    return dataclasses.replace(captured, graph_module=module), dataclasses.replace(plan, nodes=nodes), len(reads)


def _stored(captured: CapturedGraph, plan: ShardingPlan) -> dict[fx.Node, Placements | None]:
    """Where every value lies before anything is moved; None for what is no tensor."""
    graph = captured.graph_module.graph
    stored = {node: plan.nodes[node.name].outputs[0] for node in graph.nodes if node.op != "output"}
    for node, item in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if item.kind == "parameter":
            stored[node] = plan.parameters[item.name]
    return stored


def _reads_before(graph: fx.Graph, plan: ShardingPlan, stored: Mapping[fx.Node, Placements | None]) -> Reads:
    """The reads of aliases that are better made of a value before them."""
    reads: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in graph.nodes:
        for position, (argument, placements) in enumerate(
            zip(fxn.tensor_arguments(node), _wanted(node, plan), strict=True)
        ):
            earlier = _before(argument, placements, stored)
            if earlier is not argument:
                reads[node, position] = earlier
    return reads


def _wanted(node: fx.Node, plan: ShardingPlan) -> Sequence[Placements | None]:
    """The placement that each tensor argument of ``node`` is read in; None where it is read as it lies."""
    if node.op == "output":
        return plan.outputs
    if fxn.is_getitem(node):
        return (None,)
    return plan.nodes[node.name].inputs if node.op == "call_function" else ()


def _before(node: fx.Node, wanted: Placements | None, stored: Mapping[fx.Node, Placements | None]) -> fx.Node:
    """The last value before the aliases that lies as wanted; ``node`` itself if it does, or if none does."""
    source = node
    while wanted is not None and stored[source] != wanted and source.target is _ALIAS:
        source = source.all_input_nodes[0]
    return source if stored[source] == wanted else node


def _rewired(graph: fx.Graph, reads: Reads) -> fx.Graph:
    """A copy of the graph in which every read is as ``reads`` has it; names stay."""
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copied.node_copy(node, env.__getitem__)
        env[node].args, env[node].kwargs = _read_as(node, reads, env)
    return copied


def _read_as(node: fx.Node, reads: Reads, env: dict[fx.Node, fx.Node]) -> tuple[Any, Any]:
    # One argument may stand in two places and be read in two placements: places are told apart, not arguments.
    positions = itertools.count()
    arguments = (node.args, dict(node.kwargs))
    return fx.map_arg(arguments, lambda argument: env[reads.get((node, next(positions)), argument)])  # type: ignore[return-value]


def _erase_unread(graph: fx.Graph) -> set[str]:
    """Erase the aliases that nobody reads, the last first; their names."""
    unread: set[str] = set()
    for node in reversed(list(graph.nodes)):
        if node.target is _ALIAS and not node.users:
            unread.add(node.name)
            graph.erase_node(node)
    return unread
