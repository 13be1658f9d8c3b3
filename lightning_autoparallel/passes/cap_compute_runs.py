"""``cap_compute_runs``: a new order leaves no long stretch of computing without a gradient's reduction.

Calls that were moved between two reductions delay the second one, and keep whole gradients in memory until then.
``schedule_overlap`` notes at every reduction how many heavy calls were ahead of it before it ordered anything. It is
left its order where another one is predicted to take longer: it has reckoned with the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.in_order import reorder
from lightning_autoparallel.passes.bucketing.moves import hoist, moving_with
from lightning_autoparallel.passes.scheduling.calls import is_heavy
from lightning_autoparallel.passes.scheduling.runs import RUN_BEFORE, runs_between_reductions

_LEAST_GAIN = 1e-3  # of the predicted time: less is noise


def cap_compute_runs(
    graph: fx.Graph,
    *,
    max_consecutive: int = 8,
    costs: CostModel | None = None,
    times_of: Callable[[fx.Graph], Mapping[fx.Node, float] | None] = lambda graph: None,
) -> tuple[str, ...]:
    """Start gradients' reductions sooner where more than ``max_consecutive`` heavy calls now run ahead of them.

    Runs that were that long before they were ordered may stay as long as they were. What a reduction itself needs
    stays ahead of it, and a reduction that needs a random call of the run stays where it is. With ``costs``, all stay
    where that is predicted to be faster; ``times_of`` has the times of calls, where they are known.
    """
    before = list(graph.nodes)[:-1]
    notes, started = _capped(graph, max_consecutive)
    if not started or costs is None:
        return notes
    times_us = times_of(graph)
    with contextlib.suppress(UnsupportedOpError, ConfigError):
        time_us = costs.timeline(graph, times_us).time_us
        sooner = list(graph.nodes)[:-1]
        reorder(graph, before)
        kept_us = costs.timeline(graph, times_us).time_us
        if kept_us < time_us * (1 - _LEAST_GAIN):
            return (
                f"order kept: {time_us / 1e3:.2f} ms with {started} reductions sooner, {kept_us / 1e3:.2f} as it is",
            )
        reorder(graph, sooner)
    return notes


def _capped(graph: fx.Graph, max_consecutive: int) -> tuple[tuple[str, ...], int]:
    """Cap the runs; notes, and how many reductions start sooner."""
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
        return (), 0
    more = f", {over} of them need more themselves" if over else ""
    return (f"at most {longest} heavy calls between reductions, {started} of which started sooner{more}",), started


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
