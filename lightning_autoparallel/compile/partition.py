"""``partition_graph``: what the forward computes, what it saves, what the backward computes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from lightning_autoparallel.compile.decide import decide
from lightning_autoparallel.contracts import CheckpointFunction, Decision, PartitionedGraph, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn

DECISION_KEY = "recompute"


def partition_graph(
    sharded: ShardedGraph,
    reshard_after_forward: bool = True,
    activation_checkpointing: str | CheckpointFunction = "none",
) -> PartitionedGraph:
    """Split ``sharded`` in two; without a backward the forward is the whole graph.

    The backward recomputes free views, the user's checkpoint regions, what ``activation_checkpointing`` says and, with
    ``reshard_after_forward``, every parameter gather with the whole chain before and after it, so that nothing that
    holds gathered data is saved. Random draws are never repeated. Each recomputed value is made right before the
    backward first reads it: of checkpointed blocks one at a time is alive.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    if not sharded.has_backward:
        return PartitionedGraph(sharded=sharded, forward=sharded.graph_module, backward=None)
    return _Partition(sharded, reshard_after_forward, activation_checkpointing).split()


def _annotate(decisions: Mapping[fx.Node, Decision]) -> None:
    for node, decision in decisions.items():
        # Nodes share their annotations with what they were lowered from: each gets its own.
        node.meta["custom"] = {**(node.meta.get("custom") or {}), DECISION_KEY: decision}


class _Partition:
    def __init__(self, sharded: ShardedGraph, reshard_after_forward: bool, policy: str | CheckpointFunction) -> None:
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
        self._forward = fxn.with_ancestors(self._results) - set(self._placeholders)
        # A result that only the backward reads (pooling indices, attention statistics) comes from a call that has run.
        self._forward |= {node for node in self._nodes if fxn.is_getitem(node) and node.args[0] in self._forward}
        calls = [node for node in self._nodes if node in self._forward]
        parameters = [node for node, item in by_input if item.kind == "parameter"]
        self._decisions = decide(calls, parameters, reshard_after_forward, policy)
        _annotate(self._decisions)
        self._saved: dict[fx.Node, None] = {}

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
            decisions={node.name: decision for node, decision in self._decisions.items()},
        )

    def _make_forward(self, saved: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        wanted = self._forward | fxn.with_ancestors(saved)
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
        needed = fxn.with_ancestors(self._gradients) - self._forward
        for node in self._nodes:
            if node.op == "call_function" and node in needed:
                self._require(node.all_input_nodes, order)
                order[node] = False
        self._require(self._gradients, order)
        return list(order.items())

    def _require(self, nodes: Iterable[fx.Node], order: dict[fx.Node, bool]) -> None:
        """Have ``nodes`` at hand: saved, or recomputed from what is, arguments first."""
        pending = list(nodes)[::-1]
        while pending:
            node = pending[-1]
            missing: list[fx.Node] = []
            if self._is_recomputed(node) and node not in order:
                missing = [argument for argument in node.all_input_nodes if not self._is_at_hand(argument, order)]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if self._is_at_hand(node, order):
                continue
            if self._is_recomputed(node):
                order[node] = True
            else:
                assert node.op == "placeholder" or node in self._forward, f"{node.name} is of neither half"
                self._saved[node] = None

    def _is_at_hand(self, node: fx.Node, order: dict[fx.Node, bool]) -> bool:
        return node in order or node in self._saved or node in self._tangents

    def _is_recomputed(self, node: fx.Node) -> bool:
        # What is several tensors cannot be saved itself: its results are, or are picked from it again.
        return self._decisions.get(node) == "recompute" or (
            node in self._forward and not isinstance(node.meta["val"], torch.Tensor)
        )

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
