"""``partition_graph``: what the forward computes, what it saves, what the backward computes again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from lightning_autoparallel.compile.backward_order import BackwardOrder, backward_order
from lightning_autoparallel.compile.decide import decide
from lightning_autoparallel.contracts import CheckpointFunction, PartitionedGraph, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.graph_modules import graph_module


def partition_graph(
    sharded: ShardedGraph,
    reshard_after_forward: bool = True,
    activation_checkpointing: str | CheckpointFunction = "none",
    warn: Callable[[str], None] = lambda message: None,
) -> PartitionedGraph:
    """Split ``sharded`` in two; without a backward the forward is the whole graph.

    The backward recomputes free views, the user's checkpoint regions, what ``activation_checkpointing`` says and, with
    ``reshard_after_forward``, every parameter gather with the whole chain before and after it, so that nothing that
    holds gathered data is saved. Random draws are never repeated. Each recomputed value is made right before the
    backward first reads it: of checkpointed blocks one at a time is alive. ``warn`` is told where a policy's name finds
    nothing to recompute.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    if not sharded.has_backward:
        return PartitionedGraph(sharded=sharded, forward=sharded.graph_module, backward=None)
    return _Partition(sharded, reshard_after_forward, activation_checkpointing, warn).split()


def decided_backward(
    sharded: ShardedGraph, reshard_after_forward: bool, activation_checkpointing: str | CheckpointFunction
) -> BackwardOrder:
    """What the backward calls, and what it reads of the forward, as ``partition_graph`` decides it.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    return _Partition(sharded, reshard_after_forward, activation_checkpointing, lambda message: None).order()


class _Partition:
    def __init__(
        self,
        sharded: ShardedGraph,
        reshard_after_forward: bool,
        policy: str | CheckpointFunction,
        warn: Callable[[str], None],
    ) -> None:
        self._sharded = sharded
        self._nodes = list(sharded.graph_module.graph.nodes)
        (output,) = [node for node in self._nodes if node.op == "output"]
        results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        kinds = [item.kind for item in sharded.outputs]
        self._results = [node for node, kind in zip(results, kinds, strict=True) if kind != "gradient"]
        self._gradients = [node for node, kind in zip(results, kinds, strict=True) if kind == "gradient"]
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        by_input = list(zip(self._placeholders, sharded.inputs, strict=True))
        self._tangents = [node for node, item in by_input if item.kind == "tangent"]
        early = [node for node in self._nodes if fxn.is_early(node)]
        self._forward = fxn.with_ancestors((*self._results, *early)) - set(self._placeholders)
        # A result that only the backward reads (pooling indices, attention statistics) comes from a call that has run.
        self._forward |= {node for node in self._nodes if fxn.is_getitem(node) and node.args[0] in self._forward}
        calls = [node for node in self._nodes if node in self._forward]
        parameters = [node for node, item in by_input if item.kind == "parameter"]
        self._decisions = decide(calls, parameters, reshard_after_forward, policy, warn)

    def split(self) -> PartitionedGraph:
        """The two graphs; the forward returns its results, then the saved values that are not inputs."""
        order = self.order()
        inputs = [node for node in order.saved if node.op == "placeholder"]
        values = [node for node in order.saved if node.op != "placeholder"]
        assert self._forward.issuperset(values), "the backward reads what is of neither half"
        positions = {node: i for i, node in enumerate(self._placeholders)}
        return PartitionedGraph(
            sharded=self._sharded,
            forward=self._make_forward(values),
            backward=self._make_backward(order.calls, inputs, values),
            saved_inputs=tuple(positions[node] for node in inputs),
            saved_values=len(values),
            decisions={node.name: decision for node, decision in self._decisions.items()},
        )

    def order(self) -> BackwardOrder:
        """What the backward calls, and reads of the forward."""
        needed = fxn.with_ancestors(self._gradients) - self._forward
        return backward_order(self._nodes, needed, self._gradients, self._tangents, self._is_recomputed)

    def _make_forward(self, saved: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            if (node.op == "placeholder" and node not in self._tangents) or node in self._forward:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output([env[node] for node in (*self._results, *saved)])
        return _module(graph)

    def _is_recomputed(self, node: fx.Node) -> bool:
        # What is several tensors cannot be saved itself: its results are, or are picked from it again.
        return self._decisions.get(node) == "recompute" or (
            node in self._forward and not isinstance(node.meta["val"], torch.Tensor)
        )

    def _make_backward(self, calls: list[fx.Node], inputs: list[fx.Node], values: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in (*inputs, *values, *self._tangents):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in calls:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output([env[node] for node in self._gradients])
        return _module(graph)


def _module(graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return graph_module(torch.nn.Module(), graph)
