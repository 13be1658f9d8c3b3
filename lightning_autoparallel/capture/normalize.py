"""A captured graph without aliases, dead code and attributes: placeholders, calls and one flat output."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.capture.edges import EdgeAliases, is_edge
from lightning_autoparallel.capture.products import unflatten_products
from lightning_autoparallel.torch_compat.tracing import lazy_graph_module

aten = torch.ops.aten

_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
# Checks of values, torch's own for indices among them: they give no value that a plan could place.
_CHECKS = {
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten._functional_assert_async.msg,
}
# What a profiler notes while the step is traced: real steps run none of the modules that it would name.
_MARKS = {
    torch.ops.profiler._record_function_enter.default,
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_VIEWS = {aten._unsafe_view.default: aten.view.default, aten.reshape.default: aten.view.default}


def normalize_graph(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """The same program with flat placeholders; the real tensors it used as constants, by placeholder name, in order.

    Outputs without a value (the gradient of an input that needs none) are dropped.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Tensor] = {}
    edges = EdgeAliases()
    nodes = list(graph_module.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            env[node] = _copy(graph, node, env)
    for node in nodes:
        if node.op == "get_attr":
            value = _attribute(graph_module, str(node.target))
            env[node] = _constant(graph, node, constants, value)
    for node in nodes:
        if node.op == "call_function" and node.target not in _CHECKS | _MARKS:
            env[node] = _call(graph, node, env)
            if is_edge(node):
                edges.alias(env[node])
        elif node.op == "output":
            results = [env[item] for item in _flat(node.args[0]) if item is not None]
            graph.output(results)
    graph.eliminate_dead_code()
    unflatten_products(graph)
    graph.lint()
    return lazy_graph_module(graph), constants


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _call(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    if node.target in _IDENTITIES:
        return env[node.args[0]]  # type: ignore[index]
    if node.target is operator.getitem and isinstance(node.args[0], (list, tuple)):
        return env[node.args[0][node.args[1]]]  # type: ignore[index]
    if node.target in _SQUEEZES:
        return _squeeze(graph, node, env)
    copied = _copy(graph, node, env)
    copied.target = _VIEWS.get(node.target, node.target)  # type: ignore[call-overload]
    return copied


def _squeeze(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """With exactly the dims that go: which ones have size 1 is another question on a rank's shard."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    named: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    wanted = {dim % max(len(shape), 1) for dim in ([named] if isinstance(named, int) else named)}
    copied = _copy(graph, node, env)
    copied.target = aten.squeeze.dims
    copied.args = (copied.args[0], [dim for dim in sorted(wanted) if shape and shape[dim] == 1])
    return copied


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    if node.op == "placeholder":
        copied = graph.placeholder(node.name)
        copied.meta = dict(node.meta)
        return copied
    return graph.node_copy(node, lambda argument: env[argument])


def _constant(graph: fx.Graph, node: fx.Node, constants: dict[str, Tensor], value: Tensor) -> fx.Node:
    placeholder = graph.placeholder(f"constant_{len(constants)}")
    placeholder.meta = dict(node.meta)
    constants[placeholder.name] = value
    return placeholder


def _attribute(module: Any, path: str) -> Tensor:
    value = module
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, Tensor), f"{path} is no tensor"
    return value
