"""Whose code a graph's time is: that of each module, submodules apart."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.cost import Timeline
from lightning_autoparallel.cost.streams import COMPUTE
from lightning_autoparallel.fx import nodes as fxn

_NONE = 1e-6  # microseconds, of sums of many


def times_by_module(graph: fx.Graph, timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Microseconds of computing, and of waiting for collectives, by the path of the module that calls them.

    They add up to what the graph computes and to what is exposed. A collective that several modules share is of the one
    that it is called for first. The empty path has what is called outside of any submodule, and the time behind the
    last call in which collectives that nothing waits for come to their end.
    """
    found: dict[str, list[float]] = {}
    for node in graph.nodes:
        stream, _, duration_us = timeline.spans.get(node.name, ("", 0.0, 0.0))
        stalled_us = timeline.stalls_us.get(node.name, 0.0)
        if stream == COMPUTE or stalled_us:
            own = found.setdefault(fxn.module_path(node) or "", [0.0, 0.0])
            own[0] += duration_us if stream == COMPUTE else 0.0
            own[1] += stalled_us
    behind_us = timeline.exposed_us - sum(timeline.stalls_us.values())
    if behind_us > _NONE:
        found.setdefault("", [0.0, 0.0])[1] += behind_us
    return {path: (computing_us, exposed_us) for path, (computing_us, exposed_us) in found.items()}
