"""``merge_identical_collectives``: the same collective of the same value is launched once.

Lowering shares redistributions of one node, but two nodes of the step may compute the same thing (a weight transposed
in two places, a mask made twice), and each would be communicated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn


def merge_identical_collectives(graph: fx.Graph) -> tuple[str, ...]:
    """Replace a collective by an earlier equal one; first the equal pure computations that lead to it.

    Nothing random and nothing that a checkpoint region computes is shared: a region's values must stay its own.
    """
    feeding = _feeding_collectives(graph)
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in feeding or fxn.is_random(node):
            continue
        key = _key(node)
        first = seen.setdefault(key, node)
        if first is not node:
            merged += fxn.collective_kind(node) is not None
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return (f"{merged} collectives merged",) if merged else ()


def _feeding_collectives(graph: fx.Graph) -> set[fx.Node]:
    """Collectives, their waits, and everything that only leads to collectives."""
    feeding: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            fxn.collective_kind(node)
            or fxn.is_wait(node)
            or (node.users and all(user in feeding for user in node.users))
        ):
            feeding.add(node)
    return feeding


def _key(node: fx.Node) -> Any:
    def freeze(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return tuple(freeze(item) for item in argument)
        if isinstance(argument, dict):
            return tuple(sorted((name, freeze(item)) for name, item in argument.items()))
        return argument if isinstance(argument, fx.Node) else (type(argument).__name__, argument)

    value = node.meta["val"]
    geometry = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
    # A slice by this rank's place on one axis may be that by its place on another: here, but not on other ranks.
    own = fxn.custom(node, "checkpoint_region"), fxn.rank_axis(node)
    return node.target, freeze(node.args), freeze(dict(node.kwargs)), geometry, own
