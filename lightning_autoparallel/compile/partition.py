"""``partition_graph``: what the forward computes, what it saves, what the backward computes again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from lightning_autoparallel.contracts import PartitionedGraph, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn


def partition_graph(sharded: ShardedGraph, reshard_after_forward: bool = True) -> PartitionedGraph:
    """Split ``sharded`` in two; without a backward the forward is the whole graph.

    The backward recomputes free views, the user's checkpoint regions and, with ``reshard_after_forward``, every
    parameter gather with the whole chain before and after it, so that nothing that holds gathered data is saved. Random
    draws are never repeated.
    """
    if not sharded.has_backward:
        return PartitionedGraph(sharded=sharded, forward=sharded.graph_module, backward=None)
    return _Partition(sharded, reshard_after_forward).split()


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def parameter_of(graph: fx.Graph, parameters: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For every node that depends on one parameter and nothing else, that parameter."""
    origin: dict[fx.Node, fx.Node] = {node: node for node in parameters}
    for node in graph.nodes:
        sources = {origin.get(argument) for argument in node.all_input_nodes}
        if node.op == "call_function" and len(sources) == 1 and (source := sources.pop()) is not None:
            origin[node] = source
    return origin


class _Partition:
    def __init__(self, sharded: ShardedGraph, reshard_after_forward: bool) -> None:
        self._sharded = sharded
        self._nodes = list(sharded.graph_module.graph.nodes)
        (output,) = [node for node in self._nodes if node.op == "output"]
        results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        kinds = [item.kind for item in sharded.outputs]
        self._results = [node for node, kind in zip(results, kinds, strict=True) if kind != "gradient"]
        self._gradients = [node for node, kind in zip(results, kinds, strict=True) if kind == "gradient"]
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._tangents = [
            n for n, item in zip(self._placeholders, sharded.inputs, strict=True) if item.kind == "tangent"
        ]
        self._forward = _ancestors(self._results) - set(self._placeholders)
        # A result that only the backward reads (pooling indices, attention statistics) comes from a call that has run.
        self._forward |= {node for node in self._nodes if fxn.is_getitem(node) and node.args[0] in self._forward}
        self._recomputed = self._choose_recomputed(reshard_after_forward)
        self._saved: dict[fx.Node, None] = {}

    def _choose_recomputed(self, reshard_after_forward: bool) -> set[fx.Node]:
        chosen = {node for node in self._forward if fxn.is_view_of_all(node)}
        chosen |= {node for node in self._forward if self._inside_region(node)}
        if reshard_after_forward:
            chosen |= self._after_parameter_gather()
        return {node for node in chosen if not fxn.is_random(node)}

    def _inside_region(self, node: fx.Node) -> bool:
        """Whether a node is of a checkpoint region and used by it alone: what others read of it is saved."""
        region = fxn.custom(node, "checkpoint_region")
        if region is None:
            return False
        readers = [user for user in node.users if user in self._forward]
        return all(fxn.custom(user, "checkpoint_region") == region for user in readers)

    def _after_parameter_gather(self) -> set[fx.Node]:
        inputs = zip(self._placeholders, self._sharded.inputs, strict=True)
        origin = parameter_of(self._sharded.graph_module.graph, {n for n, item in inputs if item.kind == "parameter"})
        gathered: set[fx.Node] = set()
        leading: set[fx.Node] = set()  # casts and copies of shards, on their way into a gather
        for node in self._nodes:
            if node not in origin:
                continue
            if fxn.collective_kind(node) == "all_gather":
                leading |= _ancestors(node.all_input_nodes)
                gathered.add(node)
            elif any(argument in gathered for argument in node.all_input_nodes):
                gathered.add(node)
        return (gathered | (leading - set(self._placeholders))) & self._forward

    def split(self) -> PartitionedGraph:
        """The two graphs; the forward returns its results, then the saved values that are not inputs."""
        backward = self._make_backward()
        inputs = [node for node in self._saved if node.op == "placeholder"]
        values = [node for node in self._saved if node.op != "placeholder"]
        positions = {node: i for i, node in enumerate(self._placeholders)}
        return PartitionedGraph(
            sharded=self._sharded,
            forward=self._make_forward(values),
            backward=self._finish_backward(backward, inputs, values),
            saved_inputs=tuple(positions[node] for node in inputs),
            saved_values=len(values),
        )

    def _make_forward(self, saved: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        wanted = self._forward | _ancestors(saved)
        for node in self._nodes:
            if (node.op == "placeholder" and node not in self._tangents) or (
                node.op == "call_function" and node in wanted
            ):
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output([env[node] for node in (*self._results, *saved)])
        return _module(graph)

    def _make_backward(self) -> list[tuple[fx.Node, bool]]:
        """The backward's calls in order, recomputed ones (True) right before their first use; fills ``self._saved``."""
        order: dict[fx.Node, bool] = {}
        needed = _ancestors(self._gradients) - self._forward
        for node in self._nodes:
            if node.op == "call_function" and node in needed:
                self._require(node.all_input_nodes, order)
                order[node] = False
        self._require(self._gradients, order)
        return list(order.items())

    def _require(self, nodes: Iterable[fx.Node], order: dict[fx.Node, bool]) -> None:
        for node in nodes:
            if node in order or node in self._saved or node in self._tangents:
                continue
            if node in self._recomputed or (node in self._forward and not isinstance(node.meta["val"], torch.Tensor)):
                self._require(node.all_input_nodes, order)
                order[node] = True
            else:
                assert node in self._forward or node.op == "placeholder", f"{node.name} is neither forward nor backward"
                self._saved[node] = None

    def _finish_backward(
        self, order: list[tuple[fx.Node, bool]], inputs: list[fx.Node], values: list[fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in (*inputs, *values, *self._tangents):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node, recomputed in order:
            env[node] = graph.node_copy(node, env.__getitem__)
            if recomputed:
                env[node].meta["recomputed"] = True
        graph.output([env[node] for node in self._gradients])
        return _module(graph)


def _module(graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)
