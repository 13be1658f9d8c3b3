"""When each call of a graph runs: one stream that computes, and one per process group that communicates.

Calls are started in the graph's order. A collective starts once everything before it on the compute stream is done
(its process group's stream waits for the compute stream as it is started, as torch's does) and its group is free; a
wait holds the compute stream until the collective is done. Groups whose bytes go over the same link at once share it
(``traffic.py``). Where processors or bandwidth are shared, computing and collectives lose beside each other, too: while
something computes, collectives go on at the hardware's ``overlap_pace``, and what one takes from computing is
``overlap_share`` of the time that it takes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from lightning_autoparallel.contracts import TimelineEvent
from lightning_autoparallel.cost.collective import Link, collective_time_us, moving_time_us
from lightning_autoparallel.cost.compute import graph_times_us
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.traffic import Running, Traffic, Use, shared_links
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn

Span = tuple[str, float, float]  # stream, begin and duration in microseconds
COMPUTE = "compute"  # the stream of everything but collectives; theirs have the names of their process groups


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A graph's calls over time, predicted.

    ``time_us`` is the end of the last of them, ``compute_us`` the compute stream's busy time, ``communication_us`` the
    sum over collectives, and ``exposed_us`` what is left of the time when nothing computes. ``stalls_us`` has the
    collectives whose wait holds the compute stream, by name, and for how long. ``spans`` has the stream, begin and
    duration of each call, by name, in the graph's order.
    """

    time_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    spans: Mapping[str, Span]
    stalls_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The calls, as reports have them."""
        return tuple(
            TimelineEvent(name=name, stream=stream, start_us=start_us, duration_us=duration_us)
            for name, (stream, start_us, duration_us) in self.spans.items()
        )


def predict_timeline(
    graph: fx.Graph,
    hardware: HardwareSpec,
    groups: Mapping[str, GroupShape],
    times_us: Mapping[fx.Node, float] | None = None,
) -> Timeline:
    """The timeline of ``graph`` in its present order, ``groups`` by process group name.

    ``times_us`` are what ``graph_times_us`` gives, where they are known, of this order or of another one: only which
    of the calls that share a read is charged for it depends on the order. They may hold collectives' times as well.

    Raises:
        UnsupportedOpError: an operator or a process group of which nothing is known.
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    shares = shared_links(link_uses(graph), groups, hardware)
    streams = _Streams(hardware)
    if times_us is None:
        times_us = graph_times_us(graph, hardware)
    for node in graph.nodes:
        if fxn.is_wait(node):
            streams.wait(node)
        elif fxn.collective_kind(node):
            # A call that only starts a collective takes no time itself.
            time_us = times_us.get(node) or node_collective_time_us(node, hardware, groups)
            own = shares[use_of(node)]
            moving_us = min(_moving_us(node, hardware, groups), time_us) if own else time_us
            streams.communicate(node, time_us, moving_us, own)
        elif times_us[node]:
            streams.compute(node, times_us[node])
    return streams.timeline()


def node_collective_time_us(node: fx.Node, hardware: HardwareSpec, groups: Mapping[str, GroupShape]) -> float:
    """Microseconds of the collective that ``node`` starts.

    Raises:
        UnsupportedOpError: its kind has no cost, or its process group is not one of ``groups``.
    """
    group, kind = use_of(node)
    if group not in groups:
        raise UnsupportedOpError(
            f"{node.name} runs on process group {group!r}, of which nothing is known: groups are {', '.join(groups)}"
        )
    return collective_time_us(kind, fxn.collective_size_bytes(node), groups[group], hardware)


def use_of(node: fx.Node) -> Use:
    """What a collective is to links: its group and its kind."""
    return fxn.group_of(node), fxn.collective_kind(node) or str(node.target)


def link_uses(graph: fx.Graph) -> list[Use]:
    """Those of a graph's collectives."""
    return list(dict.fromkeys(map(use_of, fxn.collectives_of(graph))))


def _moving_us(node: fx.Node, hardware: HardwareSpec, groups: Mapping[str, GroupShape]) -> float:
    """Of its bytes, latency apart."""
    group, kind = use_of(node)
    return moving_time_us(kind, fxn.collective_size_bytes(node), groups[group], hardware)


class _Streams:
    def __init__(self, hardware: HardwareSpec) -> None:
        self._beside = hardware.overlap_pace  # of collectives, while something computes
        self._computing = 1 - hardware.overlap_share * hardware.overlap_pace  # its pace, while a collective runs
        self._clock_us = 0.0  # of the compute stream
        self._traffic = Traffic()
        self._done: set[fx.Node] = set()
        self._busy_us = self._communication_us = 0.0
        self._spans: dict[str, Span] = {}  # by node, in the graph's order
        self._stalls_us: dict[str, float] = {}

    def compute(self, node: fx.Node, duration_us: float) -> None:
        start_us, left_us = self._clock_us, duration_us
        while (beside_us := self._next_done_us(self._beside)) is not None and left_us > self._computing * beside_us:
            self._pass(beside_us, self._beside)
            left_us -= self._computing * beside_us
        if beside_us is None:
            self._clock_us += left_us
        elif left_us:
            self._pass(left_us / self._computing, self._beside)
        taken_us = self._clock_us - start_us
        self._busy_us += taken_us
        self._add(node, COMPUTE, start_us)

    def communicate(self, node: fx.Node, duration_us: float, moving_us: float, shares: Mapping[Link, float]) -> None:
        self._communication_us += duration_us
        self._add(node, fxn.group_of(node), self._clock_us)
        latency_us = duration_us - moving_us
        running = Running(node=node, latency_us=latency_us, moving_us=moving_us, start_us=self._clock_us, shares=shares)
        self._traffic.start(fxn.group_of(node), running)
        self._pass(0.0, 1.0)  # one that takes no time is done

    def wait(self, node: fx.Node) -> None:
        collective, since_us = fxn.waited_collective(node), self._clock_us
        while collective is not None and collective not in self._done:
            self._until_next()
        if collective is not None and self._clock_us > since_us:
            self._stalls_us[collective.name] = self._clock_us - since_us

    def _until_next(self) -> None:
        next_us = self._next_done_us(1.0)
        assert next_us is not None, "what is waited for was started"
        self._pass(next_us, 1.0)

    def _next_done_us(self, pace: float) -> float | None:
        """Microseconds until the next collective is done, or shares a link; None while none runs."""
        next_us = self._traffic.next_us()
        return None if next_us is None else next_us / pace

    def _pass(self, time_us: float, pace: float) -> None:
        """Let time go by in which every first collective of a group goes on at this pace."""
        self._clock_us += time_us
        for group, running in self._traffic.go_on(time_us * pace, self._clock_us):
            self._done.add(running.node)
            self._add(running.node, group, running.start_us)

    def _add(self, node: fx.Node, stream: str, start_us: float) -> None:
        """From then until now."""
        self._spans[node.name] = stream, start_us, self._clock_us - start_us

    def timeline(self) -> Timeline:
        while not self._traffic.is_over:
            self._until_next()
        time_us = max((start_us + duration_us for _, start_us, duration_us in self._spans.values()), default=0.0)
        return Timeline(
            time_us=time_us,
            compute_us=self._busy_us,
            communication_us=self._communication_us,
            exposed_us=time_us - self._busy_us,
            spans=self._spans,
            stalls_us=self._stalls_us,
        )
