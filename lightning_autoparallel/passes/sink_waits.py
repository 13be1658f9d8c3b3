"""``sink_waits``: a collective is waited for where its result is first used, not where it was started.

Lowering writes every wait right behind its collective. A gradient's reduction then runs beside the rest of the
backward, instead of stopping it.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def sink_waits(graph: fx.Graph) -> tuple[str, ...]:
    """Move waits, and the views of what they wait for, right before their first use. Nothing else moves."""
    moved = 0
    for node in reversed(list(graph.nodes)):
        if not node.users or not (fxn.is_wait(node) or _is_view_of_wait(node)):
            continue
        first = min(node.users)  # nodes compare by their place in the graph
        if node.next is not first:
            moved += fxn.is_wait(node)
            first.prepend(node)
    return (f"{moved} waits moved to their first use",) if moved else ()


def _is_view_of_wait(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in fxn.VIEWS:
        return False
    source = node.all_input_nodes[0]
    return fxn.is_wait(source) or _is_view_of_wait(source)
