"""When each call of a graph runs: one stream that computes, and one per process group that communicates.

Calls are started in the graph's order. A collective starts once everything before it on the compute stream is done
(its process group's stream waits for the compute stream as it is started, as torch's does) and its group is free; a
wait holds the compute stream until the collective is done. While any collective runs, computing loses the hardware's
``overlap_share`` of that time, by the processors and the bandwidth that communication takes; collectives lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from lightning_autoparallel.contracts import TimelineEvent
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.cost.compute import graph_times_us
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn

COMPUTE = "compute"  # the stream of everything but collectives; theirs have the names of their process groups


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A graph's calls over time, predicted.

    ``time_us`` is the end of the last of them, ``compute_us`` the compute stream's busy time, ``communication_us`` the
    sum over collectives, and ``exposed_us`` what is left of the time when nothing computes. ``stalls_us`` has the
    collectives whose wait holds the compute stream, by name, and for how long.
    """

    time_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    events: tuple[TimelineEvent, ...]
    stalls_us: Mapping[str, float] = field(default_factory=dict)


def predict_timeline(
    graph: fx.Graph,
    hardware: HardwareSpec,
    groups: Mapping[str, GroupShape],
    times_us: Mapping[fx.Node, float] | None = None,
) -> Timeline:
    """The timeline of ``graph`` in its present order, ``groups`` by process group name.

    ``times_us`` are what ``graph_times_us`` gives, where they are known, of this order or of another one: only which
    of the calls that share a read is charged for it depends on the order.

    Raises:
        UnsupportedOpError: an operator or a process group of which nothing is known.
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    streams = _Streams(hardware.overlap_share)
    if times_us is None:
        times_us = graph_times_us(graph, hardware)
    for node in graph.nodes:
        if fxn.is_wait(node):
            streams.wait(node)
        elif fxn.collective_kind(node):
            streams.communicate(node, node_collective_time_us(node, hardware, groups))
        elif times_us[node]:
            streams.compute(node, times_us[node])
    return streams.timeline()


def node_collective_time_us(node: fx.Node, hardware: HardwareSpec, groups: Mapping[str, GroupShape]) -> float:
    """Microseconds of the collective that ``node`` starts.

    Raises:
        UnsupportedOpError: its kind has no cost, or its process group is not one of ``groups``.
    """
    kind, group = fxn.collective_kind(node), fxn.group_of(node)
    if group not in groups:
        raise UnsupportedOpError(
            f"{node.name} runs on process group {group!r}, of which nothing is known: groups are {', '.join(groups)}"
        )
    return collective_time_us(kind or str(node.target), fxn.collective_size_bytes(node), groups[group], hardware)


class _Streams:
    def __init__(self, overlap_share: float) -> None:
        self._pace = 1 - overlap_share  # of computing, while a collective runs
        self._clock_us = 0.0  # of the compute stream
        self._free_us: dict[str, float] = {}  # by process group
        self._done_us: dict[fx.Node, float] = {}
        self._events: list[TimelineEvent] = []
        self._stalls_us: dict[str, float] = {}

    def compute(self, node: fx.Node, duration_us: float) -> None:
        # What was started runs without a gap until the last of it is done, or it waits for a group that is not free.
        beside_us = max(0.0, max(self._free_us.values(), default=0.0) - self._clock_us)
        if duration_us > beside_us * self._pace:
            taken_us = beside_us + duration_us - beside_us * self._pace
        else:
            taken_us = duration_us / self._pace
        self._add(node, COMPUTE, self._clock_us, taken_us)
        self._clock_us += taken_us

    def communicate(self, node: fx.Node, duration_us: float) -> None:
        group = fxn.group_of(node)
        start_us = max(self._clock_us, self._free_us.get(group, 0.0))
        self._add(node, group, start_us, duration_us)
        self._free_us[group] = self._done_us[node] = start_us + duration_us

    def wait(self, node: fx.Node) -> None:
        collective = fxn.waited_collective(node)
        if collective is not None and self._done_us[collective] > self._clock_us:
            self._stalls_us[collective.name] = self._done_us[collective] - self._clock_us
            self._clock_us = self._done_us[collective]

    def _add(self, node: fx.Node, stream: str, start_us: float, duration_us: float) -> None:
        self._events.append(TimelineEvent(name=node.name, stream=stream, start_us=start_us, duration_us=duration_us))

    def timeline(self) -> Timeline:
        time_us = max((event.end_us for event in self._events), default=0.0)
        compute_us = sum(event.duration_us for event in self._events if event.stream == COMPUTE)
        return Timeline(
            time_us=time_us,
            compute_us=compute_us,
            communication_us=sum(event.duration_us for event in self._events if event.stream != COMPUTE),
            exposed_us=time_us - compute_us,
            events=tuple(self._events),
            stalls_us=self._stalls_us,
        )
