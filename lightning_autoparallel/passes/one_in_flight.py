"""``one_in_flight``: one collective runs at a time.

Gloo runs collectives on threads of its own, and ranks with several at once have died of a corrupted heap (torch 2.13,
once in a program without this package, like `tests/benchmarks/gloo_overlap.py`). On gloo the waits that other passes
have moved apart come back, over all groups.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def one_in_flight(graph: fx.Graph) -> tuple[str, ...]:
    """Wait for every collective before the next one starts."""
    running: fx.Node | None = None
    moved = 0
    for node in list(graph.nodes):
        if fxn.collective_kind(node) is None:
            continue
        for wait in [] if running is None else [user for user in running.users if fxn.is_wait(user)]:
            if node < wait:
                node.prepend(wait)
                moved += 1
        running = node
    return (f"{moved} waits moved ahead of the next collective",) if moved else ()
