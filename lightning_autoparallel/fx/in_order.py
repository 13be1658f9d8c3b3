"""The order of a graph's calls."""

from __future__ import annotations

from collections.abc import Sequence

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
    reorder(graph, [node for node in order if node.op != "output"])
    graph.lint()


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Bring all nodes but the output into this order."""
    output = graph.output_node()
    for node in nodes:
        output.prepend(node)
