"""``sink_waits``: a collective is waited for where its result is first used, not where it was started.

Lowering writes every wait right behind its collective. A gradient's reduction then runs beside the rest of the
backward, instead of stopping it. What it reads stays in memory until then, so it is waited for sooner once later
reductions have been started: whole gradients of all blocks would else be alive at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def sink_waits(graph: fx.Graph, *, outstanding: int = 2) -> tuple[str, ...]:
    """Move waits, and the views of what they wait for, right before their first use. Nothing else moves.

    Transfers that a decomposition has written stay as they are: each wait stands where the next one may start.

    Waits for terminal reductions move at most to where those that are not waited for, on their group, have
    ``outstanding`` times the bytes of the largest of them: behind the second one after theirs, where all are alike.
    """
    bounds = _bounds(graph, outstanding)
    moved = bounded = 0
    for node in reversed(list(graph.nodes)):
        if not node.users or not (fxn.is_wait(node) or _is_view_of_wait(node)) or _is_one_of_many(node):
            continue
        first = min(node.users)  # nodes compare by their place in the graph
        bound = bounds.get(node)
        if bound is not None and bound < first:
            if node < bound:
                bounded += 1
                moved += 1
                bound.append(node)
        elif node.next is not first:
            moved += fxn.is_wait(node)
            first.prepend(node)
    if not moved:
        return ()
    limit = f", {bounded} of them to where later reductions have begun" if bounded else ""
    return (f"{moved} waits moved to their first use{limit}",)


def _bounds(graph: fx.Graph, outstanding: int) -> dict[fx.Node, fx.Node]:
    """For waits of terminal reductions: the later reduction behind which they belong at the latest."""
    by_group: dict[str, list[fx.Node]] = {}
    for node in fxn.collectives_of(graph):
        if fxn.collective_role(node) == fxn.TERMINAL_REDUCTION:
            by_group.setdefault(fxn.group_of(node), []).append(node)
    return dict(pair for reductions in by_group.values() for pair in _bounds_of_group(reductions, outstanding))


def _bounds_of_group(reductions: list[fx.Node], outstanding: int) -> Iterable[tuple[fx.Node, fx.Node]]:
    most_bytes = outstanding * max(map(fxn.collective_size_bytes, reductions))
    running: deque[fx.Node] = deque()
    running_bytes = 0
    for reduction in reductions:
        running.append(reduction)
        running_bytes += fxn.collective_size_bytes(reduction)
        while running_bytes > most_bytes:
            done = running.popleft()
            running_bytes -= fxn.collective_size_bytes(done)
            yield from ((user, reduction) for user in done.users if fxn.is_wait(user))


def _is_view_of_wait(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in fxn.VIEWS:
        return False
    source = node.all_input_nodes[0]
    return fxn.is_wait(source) or _is_view_of_wait(source)


def _is_one_of_many(node: fx.Node) -> bool:
    """Whether the node waits for a transfer of a decomposed collective: the next one starts behind it."""
    return fxn.is_wait(node) and fxn.collective_kind(node.all_input_nodes[0]) in ("permute", "broadcast")
