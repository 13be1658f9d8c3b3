"""``tag_collectives``: which gathers depend on one parameter only, and which reductions only leave the graph.

Only the joint graph tells: after the partition a saved value looks like an input, and what the backward reads looks
like a result. The tag is metadata of the collective, which the partition copies, recomputed ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_autoparallel.contracts import GraphInput, GraphOutput
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.tree import tree_flatten


def tag_collectives(
    graph: fx.Graph, *, inputs: Sequence[GraphInput] = (), outputs: Sequence[GraphOutput] = ()
) -> tuple[str, ...]:
    """Tag parameter gathers, and terminal reduce-scatters and all-reduces; ``fx.nodes.collective_role`` reads the tags.

    ``inputs`` and ``outputs`` say what the placeholders and the leaves of the output are, in order.

    Raises:
        ValueError: the graph has another number of placeholders or output leaves.
    """
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    gathers = _parameter_gathers(graph, {node for node, item in placeholders if item.kind == "parameter"})
    leaves = list(zip(_results(graph), outputs, strict=True))
    leaving = _leaving(graph)
    reductions = [node for node in leaving if fxn.collective_kind(node) in ("reduce_scatter", "all_reduce")]
    for role, nodes in ((fxn.PARAMETER_GATHER, gathers), (fxn.TERMINAL_REDUCTION, reductions)):
        for node in nodes:
            node.meta["collective_role"] = role
    gradients = _upstream([leaf for leaf, item in leaves if item.kind == "gradient"], leaving)
    of_gradients = sum(node in gradients for node in reductions)
    found = {
        "gathers of parameters": len(gathers),
        "reductions of gradients": of_gradients,
        "reductions of other results": len(reductions) - of_gradients,
    }
    note = ", ".join(f"{count} {what}" for what, count in found.items() if count)
    return (note,) if note else ()


def _results(graph: fx.Graph) -> list[Any]:
    """The leaves of the output, however it is nested; a result that is no tensor is one too."""
    (output,) = graph.find_nodes(op="output")
    return tree_flatten(output.args[0])[0]


def _parameter_gathers(graph: fx.Graph, parameters: set[fx.Node]) -> list[fx.Node]:
    """The all-gathers of what is computed from one parameter and nothing else, alike each time."""
    repeatable = (node for node in graph.nodes if node.op == "call_function" and not fxn.is_random(node))
    origin = fxn.parameter_of(repeatable, parameters)
    return [node for node in origin if fxn.collective_kind(node) == "all_gather"]


def _leaving(graph: fx.Graph) -> dict[fx.Node, None]:
    """What only leads to outputs, through calls that read nothing else: reductions, their waits, views, casts."""
    leaving: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or (_repeatable(node) and all(_leads_out(user, leaving) for user in node.users)):
            leaving[node] = None
    return dict(reversed(leaving.items()))


def _repeatable(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.users) and not fxn.is_random(node)


def _leads_out(user: fx.Node, leaving: dict[fx.Node, None]) -> bool:
    return user in leaving and (user.op == "output" or len(user.all_input_nodes) == 1)


def _upstream(leaves: list[Any], leaving: dict[fx.Node, None]) -> set[fx.Node]:
    return fxn.with_ancestors((leaf for leaf in leaves if isinstance(leaf, fx.Node)), among=leaving.__contains__)
