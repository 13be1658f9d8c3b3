"""``cap_compute_runs``: a new order leaves no long stretch of computing without a gradient's reduction.

Calls that were moved between two reductions delay the second one, and keep whole gradients in memory until then.
``schedule_overlap`` notes at every reduction how many heavy calls were ahead of it before it ordered anything.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing.moves import hoist, moving_with
from lightning_autoparallel.passes.scheduling.calls import is_heavy
from lightning_autoparallel.passes.scheduling.runs import RUN_BEFORE, runs_between_reductions


def cap_compute_runs(graph: fx.Graph, *, max_consecutive: int = 8) -> tuple[str, ...]:
    """Start gradients' reductions sooner where more than ``max_consecutive`` heavy calls now run ahead of them.

    Runs that were that long before they were ordered may stay as long as they were. What a reduction itself needs
    stays ahead of it, and a reduction that needs a random call of the run stays where it is.
    """
    longest = started = over = 0
    left: list[fx.Node] = []  # what the reduction ahead was moved past
    for reduction, since in runs_between_reductions(graph, is_heavy):
        allowed = max(max_consecutive, reduction.meta.get(RUN_BEFORE, len(since)))
        run = left + since
        left = _start_sooner(reduction, run, allowed) if len(run) > allowed else []
        started += bool(left)
        over += len(run) - len(left) > allowed
        longest = max(longest, len(run) - len(left))
    if not longest:
        return ()
    more = f", {over} of them need more themselves" if over else ""
    return (f"at most {longest} heavy calls between reductions, {started} of which started sooner{more}",)


def _start_sooner(reduction: fx.Node, run: list[fx.Node], allowed: int) -> list[fx.Node]:
    """Move the reduction up to where no more than ``allowed`` of the run are ahead of it; those then behind it."""
    needed = _needed_in(reduction, set(run), run[0])
    left: list[fx.Node] = []
    for node in reversed(run):
        if len(run) - len(left) <= allowed:
            break
        if node not in needed:
            left.append(node)
    # A random call draws what the one before it left: it may not pass another.
    if not left or any(map(fxn.is_random, moving_with([reduction], left[-1]))):
        return []
    hoist(reduction, left[-1])
    return left[::-1]


def _needed_in(reduction: fx.Node, run: set[fx.Node], first: fx.Node) -> set[fx.Node]:
    # nodes compare by their place in the graph
    return fxn.with_ancestors(reduction.all_input_nodes, among=lambda node: not node < first) & run
