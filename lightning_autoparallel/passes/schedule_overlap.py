"""``schedule_overlap``: the order in which, by the cost model, the least communication is exposed.

Only predicted times decide, never measured ones, so that all ranks find the same order. What ``prefetch_gathers`` and
``sink_waits`` left is the order to beat: it stays where the scheduler's is predicted to be no faster, or to need more
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.liveness import MemoryTimeline, Surroundings, SurroundingsOf, predict_memory
from lightning_autoparallel.cost.storage import resolve_storages
from lightning_autoparallel.cost.timeline import Timeline
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx.in_order import reorder
from lightning_autoparallel.passes.scheduling import ScheduleOptions, read_calls, schedule
from lightning_autoparallel.passes.scheduling.calls import changes_inputs, is_heavy
from lightning_autoparallel.passes.scheduling.known import KnownOrders, structure_of
from lightning_autoparallel.passes.scheduling.live import EXTRA_BYTES, LiveBytes
from lightning_autoparallel.passes.scheduling.runs import note_runs

_LEAST_GAIN = 1e-3  # of the predicted time: less is noise
_MUCH_EXPOSED, _WORTH_MEMORY = 0.05, 0.01  # of the predicted time: what more memory is tried for, and has to gain
_KEPT = "order kept"


def schedule_overlap(
    graph: fx.Graph,
    *,
    costs: CostModel | None = None,
    surroundings: SurroundingsOf | None = None,
    max_compute_prefetch: int = 50,
    put_off: int = 16,
    extra_bytes: int = EXTRA_BYTES,
    known: KnownOrders | None = None,
) -> tuple[str, ...]:
    """Order the calls anew, if that is predicted to be faster.

    ``surroundings`` say what of the graph's inputs its caller holds; without them all are held. Nothing begins more
    than ``max_compute_prefetch`` heavy calls (matrix products, attention) ahead of its place, nor more than
    ``put_off`` behind it. The predicted peak of live bytes rises by ``extra_bytes`` at most above the step's, the
    graph's own or that of its surroundings; to the room that these give, where that is much faster. ``known`` remembers
    the orders of graphs that are of one structure, and have the same surroundings.
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
    ordering = _Ordering(graph, costs, times_us, around)
    note_runs(graph, ordering.calls.heavy.__contains__)
    limit_bytes = max(ordering.memory.peak_bytes, around.elsewhere_bytes) + extra_bytes
    compared = ordering.within(options_within(limit_bytes=limit_bytes), _LEAST_GAIN)
    if ordering.exposed_share > _MUCH_EXPOSED and around.room_bytes > limit_bytes:
        more = ordering.within(options_within(limit_bytes=around.room_bytes), _WORTH_MEMORY)
        compared = compared if more.startswith(_KEPT) else more
    return (compared,)


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """An order; it is that of every limit from ``limit_bytes`` up to ``refused_bytes``, the latter apart."""

    nodes: list[fx.Node]
    limit_bytes: int
    refused_bytes: float
    time: Timeline
    memory: MemoryTimeline


class _Ordering:
    """Orders of one graph; it is left in the best of those that were asked for."""

    def __init__(
        self, graph: fx.Graph, costs: CostModel, times_us: Mapping[fx.Node, float], around: Surroundings
    ) -> None:
        self._graph, self._costs, self._times_us, self._around = graph, costs, times_us, around
        self._storages = resolve_storages(graph, around.same)
        self._nodes = list(graph.nodes)[:-1]
        self.calls = read_calls(graph, costs, times_us)
        self._best = self._before = costs.timeline(graph, times_us)
        self.memory = predict_memory(graph, surroundings=around, storages=self._storages)
        self._tried: _Tried | None = None

    @property
    def exposed_share(self) -> float:
        """The share of the graph's time in which communication is exposed."""
        return self._best.exposed_us / self._best.time_us if self._best.time_us else 0.0

    def within(self, options: ScheduleOptions, gain: float) -> str:
        """Order the calls anew if that is faster by ``gain``, as a share of the time, and within the limit."""
        known = self._tried
        if known is None or not known.limit_bytes <= options.limit_bytes < known.refused_bytes:
            known = self._tried = self._order(options)
        compared = _compared(self._before, known.time, self.memory, known.memory)
        if known.time.time_us <= self._best.time_us * (1 - gain) and known.memory.peak_bytes <= options.limit_bytes:
            self._best = known.time
            reorder(self._graph, known.nodes)
            return compared
        return f"{_KEPT}; the other one: {compared}"

    def _order(self, options: ScheduleOptions) -> _Tried:
        """What the scheduler makes of the calls; the graph is left as it is."""
        graph, present = self._graph, list(self._graph.nodes)[:-1]
        reorder(graph, self._nodes)
        live = LiveBytes(graph, self._around, self._storages)
        nodes = schedule(self.calls, live, options, self.memory.live_bytes)
        reorder(graph, nodes)
        tried = _Tried(
            nodes=nodes,
            limit_bytes=options.limit_bytes,
            refused_bytes=live.refused_bytes,
            time=self._costs.timeline(graph, self._times_us),
            memory=predict_memory(graph, surroundings=self._around, storages=self._storages),
        )
        reorder(graph, present)
        return tried


def _all_held(graph: fx.Graph) -> Surroundings:
    return Surroundings(held=[node.name for node in graph.find_nodes(op="placeholder")])


def _compared(old_time: Timeline, time: Timeline, old_memory: MemoryTimeline, memory: MemoryTimeline) -> str:
    return (
        f"exposed {old_time.exposed_us / 1e3:.2f} -> {time.exposed_us / 1e3:.2f} ms, "
        f"peak {old_memory.peak_bytes / 2**30:.2f} -> {memory.peak_bytes / 2**30:.2f} GiB (predicted)"
    )
