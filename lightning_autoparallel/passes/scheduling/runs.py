"""Runs of heavy calls between gradients' reductions."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from lightning_autoparallel.fx import nodes as fxn

RUN_BEFORE = "heavy_calls_before"  # metadata of a reduction: the heavy calls since the one ahead of it, unscheduled


def runs_between_reductions(
    graph: fx.Graph, is_heavy: Callable[[fx.Node], bool]
) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Every terminal reduction, and the heavy calls since the one ahead of it; the first has a run too."""
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    run: list[fx.Node] = []
    for node in graph.nodes:
        if fxn.collective_kind(node) and fxn.collective_role(node) == fxn.TERMINAL_REDUCTION:
            found.append((node, run))
            run = []
        elif is_heavy(node):
            run.append(node)
    return found


def note_runs(graph: fx.Graph, is_heavy: Callable[[fx.Node], bool]) -> None:
    """Write at every reduction how long the run ahead of it is in the present order."""
    for reduction, run in runs_between_reductions(graph, is_heavy):
        reduction.meta[RUN_BEFORE] = len(run)
