"""The second partition of a step that was partitioned before: it saves and recomputes what the first one did.

The first partition left its decisions in the graphs: the forward returns what is saved, the backward recomputes the
rest. Retraced to one joint graph, every node still knows its half (``retrace.py``), so a value that crosses from one
half to the other is one that the first partition saved, and no node moves. Left to decide here is what the first
partition did not know: the caller's own code around the module, and what tracing adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_autoparallel.compile.backward_order import BackwardOrder, backward_order
from lightning_autoparallel.compile.retrace import half_of
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat import joint

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default}
_RECOMPUTED_TAGS = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}


def replay_partition(
    joint_module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **unused: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph of AOTAutograd in forward and backward; a ``partition_fn``.

    Calls keep their order within their half, as passes left them. Of the code around the module, views are made again
    and regions of ``torch.utils.checkpoint`` recomputed as their policy says; what else the backward reads is saved.
    """
    return _Replay(joint_module, num_fwd_outputs).split()


class _Replay:
    def __init__(self, joint_module: fx.GraphModule, num_fwd_outputs: int) -> None:
        self._module = joint_module
        self._nodes = list(joint_module.graph.nodes)
        outputs = joint.joint_outputs(joint_module.graph, num_fwd_outputs)
        self._results, self._gradients, self._result_descriptors, self._gradient_descriptors = outputs
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._backward_inputs = [node for node in placeholders if joint.is_backward_input(node)]
        self._inputs = [node for node in placeholders if not joint.is_backward_input(node)]
        self._forward = self._find_forward()

    def _find_forward(self) -> set[fx.Node]:
        """The calls of the forward; backward ones may stand between them."""
        after_tangents, marked = set(self._backward_inputs), []
        for node in self._nodes:
            if after_tangents.intersection(node.all_input_nodes):
                after_tangents.add(node)
            elif node.op == "call_function" and _was_forward(node):
                marked.append(node)
        forward = fxn.with_ancestors([*_only_nodes(self._results), *marked])
        for node in self._nodes:
            if fxn.is_getitem(node) and node.args[0] in forward:
                forward.add(node)
        assert not forward & after_tangents, "a result of the forward depends on a tangent"
        return {node for node in forward if node.op != "placeholder"}

    def split(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        order = self._order_backward()
        symbols = [node for node in order.saved if joint.is_sym_node(node)]
        values = joint.saved_order(node for node in order.saved if not joint.is_sym_node(node))
        symbols = joint.binding_symbols(self._module.graph, [*values, *self._backward_inputs], symbols)
        return self._make_forward([*values, *symbols]), self._make_backward([*symbols, *values], order.calls)

    def _order_backward(self) -> BackwardOrder:
        effects = [node for node in self._nodes if joint.has_effect(node) and node not in self._forward]
        gradients = _only_nodes(self._gradients)
        needed = fxn.with_ancestors([*gradients, *effects]) - self._forward
        return backward_order(self._nodes, needed, gradients, self._backward_inputs, self._is_recomputed)

    def _is_recomputed(self, node: fx.Node) -> bool:
        if node.op == "get_attr" or node.target in _ALIASES:
            return True
        if node.op == "placeholder" or joint.is_sym_node(node):
            return False
        if not isinstance(node.meta["val"], torch.Tensor):
            # What is several tensors cannot be saved itself: its results are, or are picked from it again.
            return True
        if half_of(node) is not None or fxn.is_random(node):
            return False
        return fxn.is_view_of_all(node) or _is_padded_input(node) or self._wants_recompute(node)

    def _wants_recompute(self, node: fx.Node) -> bool:
        """Whether a policy of ``torch.utils.checkpoint`` says so; what another of its regions reads is saved."""
        if node.meta.get("recompute") not in _RECOMPUTED_TAGS:
            return False
        region = node.meta.get("ac_graph_id")
        readers = [user for user in node.users if user in self._forward and user.meta.get("recompute") is not None]
        return all(user.meta.get("ac_graph_id") == region for user in readers)

    def _make_forward(self, saved: list[fx.Node]) -> fx.GraphModule:
        effects = [node for node in self._forward if joint.has_effect(node)]
        wanted = fxn.with_ancestors([*_only_nodes(self._results), *saved, *effects])
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {node: graph.node_copy(node) for node in self._inputs}
        for node in self._nodes:
            if node in wanted and node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
        results = [_mapped(value, env) for value in self._results]
        joint.close_forward(graph, results, [env[node] for node in saved], self._result_descriptors)
        return fx.GraphModule(self._module, graph)

    def _make_backward(self, saved: list[fx.Node], order: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in (*saved, *self._backward_inputs):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        repeated = _Repeated(env[node] for node in saved if node.op == "placeholder")
        for node in order:
            env[node] = repeated.merged(graph.node_copy(node, env.__getitem__))
        gradients = [_mapped(value, env) for value in self._gradients]
        joint.close_backward(graph, gradients, self._gradient_descriptors)
        return fx.GraphModule(self._module, graph)


def _was_forward(node: fx.Node) -> bool:
    half = half_of(node)
    return half == "forward" or (half is None and node.meta.get("partitioner_tag") == "is_forward")


class _Repeated:
    """Chains of calls that start at inputs alone, such as gathers of parameters: each is made once.

    Where compiled code calls one module several times, what its backward gathers for the last call therefore stays
    until the backward of the first call has read it: fewer launches, for at most the module's gathered parameters.
    """

    def __init__(self, inputs: Iterable[fx.Node]) -> None:
        self._from_inputs = set(inputs)
        self._made: dict[Any, fx.Node] = {}

    def merged(self, node: fx.Node) -> fx.Node:
        """The node, or an equal one that was made before; the node is then erased."""
        arguments = node.all_input_nodes
        if not arguments or not self._from_inputs.issuperset(arguments) or _is_unsafe_to_share(node):
            return node
        key = (node.target, _key(node.args), _key(node.kwargs))
        first = self._made.setdefault(key, node)
        if first is not node:
            node.graph.erase_node(node)
        self._from_inputs.add(first)
        return first


def _key(arguments: Any) -> str:
    """Nodes of one graph have names of their own."""
    return repr(arguments)


def _is_unsafe_to_share(node: fx.Node) -> bool:
    return fxn.is_random(node) or joint.has_effect(node)


def _is_padded_input(node: fx.Node) -> bool:
    """A shard that is padded to the size of the other ranks': the input is kept anyway."""
    return node.target is aten.constant_pad_nd.default and _source(node.all_input_nodes[0]).op == "placeholder"


def _source(node: fx.Node) -> fx.Node:
    while node.target in _ALIASES:
        node = node.all_input_nodes[0]
    return node


def _mapped(value: Any, env: dict[fx.Node, fx.Node]) -> Any:
    return env[value] if isinstance(value, fx.Node) else value


def _only_nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]
