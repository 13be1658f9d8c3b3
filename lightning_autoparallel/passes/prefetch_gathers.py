"""``prefetch_gathers``: the next parameter is gathered while the last one is computed with.

A gather depends on a parameter's shard only, so it may start as early as its memory is worth. Here each starts before
the one ahead of it (``depth`` ahead) is waited for: at most ``depth`` gathered parameters lie ready and unused.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing.moves import hoist


def prefetch_gathers(graph: fx.Graph, *, depth: int = 1) -> tuple[str, ...]:
    """Start every all-gather of parameters, or of an input, before the wait for the gather ``depth`` ahead of it."""
    gathers = [node for node in graph.nodes if fxn.collective_kind(node) == "all_gather" and _starts_early(node)]
    moved = 0
    for earlier, gather in zip(gathers, gathers[depth:], strict=False):
        wait = min(fxn.waits_of(earlier), default=None)
        if wait is None or gather < wait:  # nodes compare by their place in the graph
            continue
        hoist(gather, wait)
        moved += 1
    return (f"{moved} gathers started {depth} ahead",) if moved else ()


def _starts_early(gather: fx.Node) -> bool:
    """Whether what is gathered costs next to nothing to compute early.

    That holds for parameters, alone or several in a bucket, and for what a straight line of calls without other readers
    makes of one input. No collective may lie in between.
    """
    of_parameters = fxn.collective_role(gather) == fxn.PARAMETER_GATHER
    pending, seen = [gather], {gather}
    while pending:
        current = pending.pop()
        straight = of_parameters or len(current.all_input_nodes) == 1
        if not straight or fxn.is_random(current):
            return False
        sources = {node for node in current.all_input_nodes if node.op != "placeholder"} - seen
        if any(fxn.is_wait(source) or (not of_parameters and len(source.users) != 1) for source in sources):
            return False
        seen |= sources
        pending.extend(sources)
    return True
