"""``one_in_flight``: of each process group at most one collective runs at a time.

Gloo runs the collectives of a group on two threads, and two at once corrupt the heap now and then (seen with torch
2.13: a program of overlapped functional collectives alone aborts within seconds). On gloo the waits that other passes
have moved apart come back to where they are safe; collectives of different groups still overlap.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def one_in_flight(graph: fx.Graph) -> tuple[str, ...]:
    """Wait for every collective before the next one of its group starts."""
    running: dict[str, fx.Node] = {}
    moved = 0
    for node in list(graph.nodes):
        if fxn.collective_kind(node) is None:
            continue
        group = fxn.group_of(node)
        before = running.get(group)
        for wait in [] if before is None else [user for user in before.users if fxn.is_wait(user)]:
            if node < wait:
                node.prepend(wait)
                moved += 1
        running[group] = node
    return (f"{moved} waits moved ahead of the next collective of their group",) if moved else ()
