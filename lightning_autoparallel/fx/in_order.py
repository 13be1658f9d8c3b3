"""The order of a graph's calls, where some were added behind what reads them."""

from __future__ import annotations

from torch import fx


def sort_calls(graph: fx.Graph) -> None:
    """Bring every call behind what it reads; whatever need not move keeps its place among the others."""
    nodes = list(graph.nodes)
    order: dict[fx.Node, None] = dict.fromkeys(node for node in nodes if node.op == "placeholder")
    for node in nodes:
        pending = [node]
        while pending:
            missing = [argument for argument in pending[-1].all_input_nodes if argument not in order]
            if missing:
                pending += reversed(missing)
            else:
                order[pending.pop()] = None
    last: fx.Node | None = None
    for node in order:
        if last is not None:
            last.append(node)
        last = node
    graph.lint()
