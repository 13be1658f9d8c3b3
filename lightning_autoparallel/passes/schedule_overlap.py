"""``schedule_overlap``: the order in which, by the cost model, the least communication is exposed.

Only predicted times decide, never measured ones, so that all ranks find the same order. What ``prefetch_gathers`` and
``sink_waits`` left is the order to beat: it stays where the scheduler's is predicted to be no faster, or to need more
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.liveness import MemoryTimeline, Surroundings, predict_memory
from lightning_autoparallel.cost.storage import resolve_storages
from lightning_autoparallel.cost.timeline import Timeline
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx.in_order import reorder
from lightning_autoparallel.passes.scheduling import ScheduleOptions, read_calls, schedule
from lightning_autoparallel.passes.scheduling.calls import changes_inputs, is_heavy
from lightning_autoparallel.passes.scheduling.known import KnownOrders, structure_of
from lightning_autoparallel.passes.scheduling.live import LiveBytes
from lightning_autoparallel.passes.scheduling.runs import note_runs

SurroundingsOf = Callable[[fx.Graph], Surroundings]
_LEAST_GAIN = 1e-3  # of the predicted time: less is noise


def schedule_overlap(
    graph: fx.Graph,
    *,
    costs: CostModel | None = None,
    surroundings: SurroundingsOf | None = None,
    max_compute_prefetch: int = 50,
    put_off: int = 16,
    extra_bytes: int = 2**27,
    known: KnownOrders | None = None,
) -> tuple[str, ...]:
    """Order the calls anew, if that is predicted to be faster.

    ``surroundings`` say what of the graph's inputs its caller holds; without them all are held. Nothing begins more
    than ``max_compute_prefetch`` heavy calls (matrix products, attention) ahead of its place, nor more than
    ``put_off`` behind it. The predicted peak of live bytes rises by ``extra_bytes`` at most above the step's, the
    graph's own or that of its surroundings. ``known`` remembers the orders of graphs that are of one structure, and
    have the same surroundings.
    """
    if costs is None:
        return ("skipped: no costs",)
    changing = next(filter(changes_inputs, graph.nodes), None)
    if changing is not None:
        return (f"skipped: {changing.name} changes what it is given",)
    known = known or KnownOrders()
    structure = structure_of(graph)
    found = known.find(structure, graph)
    if found is not None:
        note_runs(graph, is_heavy)
        reorder(graph, found[0])
        return found[1]
    before = list(graph.nodes)[:-1]
    around = surroundings(graph) if surroundings is not None else _all_held(graph)
    options = partial(ScheduleOptions, max_compute_prefetch=max_compute_prefetch, put_off=put_off)
    try:
        times_us = costs.all_times_us(graph)
        notes = _ordered(graph, costs, times_us, around, options, extra_bytes)
    except (UnsupportedOpError, ConfigError) as error:
        return (f"skipped: {error}",)
    known.keep(structure, before, graph, times_us, notes)
    return notes


def _ordered(
    graph: fx.Graph,
    costs: CostModel,
    times_us: Mapping[fx.Node, float],
    around: Surroundings,
    options_within: Callable[..., ScheduleOptions],
    extra_bytes: int,
) -> tuple[str, ...]:
    """Order the calls anew, with a peak of at most ``extra_bytes`` above the step's present one, or leave them."""
    before, storages = list(graph.nodes)[:-1], resolve_storages(graph, around.same)
    old_time = costs.timeline(graph, times_us)
    old_memory = predict_memory(graph, surroundings=around, storages=storages)
    options = options_within(limit_bytes=max(old_memory.peak_bytes, around.elsewhere_bytes) + extra_bytes)
    calls = read_calls(graph, times_us)
    note_runs(graph, calls.heavy.__contains__)
    reorder(graph, schedule(calls, LiveBytes(graph, around, storages), options, old_memory.live_bytes))
    time = costs.timeline(graph, times_us)
    memory = predict_memory(graph, surroundings=around, storages=storages)
    compared = _compared(old_time, time, old_memory, memory)
    is_faster = time.time_us <= old_time.time_us * (1 - _LEAST_GAIN)
    if is_faster and memory.peak_bytes <= options.limit_bytes:
        return (compared,)
    reorder(graph, before)
    return (f"order kept; the other one: {compared}",)


def _all_held(graph: fx.Graph) -> Surroundings:
    return Surroundings(held=[node.name for node in graph.find_nodes(op="placeholder")])


def _compared(old_time: Timeline, time: Timeline, old_memory: MemoryTimeline, memory: MemoryTimeline) -> str:
    return (
        f"exposed {old_time.exposed_us / 1e3:.2f} -> {time.exposed_us / 1e3:.2f} ms, "
        f"peak {old_memory.peak_bytes / 2**30:.2f} -> {memory.peak_bytes / 2**30:.2f} GiB (predicted)"
    )
