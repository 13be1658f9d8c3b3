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
from lightning_autoparallel.cost.collective import collective_time_us, moving_time_us
from lightning_autoparallel.cost.compute import graph_times_us
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.streams import Span, Streams
from lightning_autoparallel.cost.traffic import Sending, Use, shared_links
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn


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
    if times_us is None:
        times_us = graph_times_us(graph, hardware)
    streams, sendings = Streams(hardware), sendings_of(graph, hardware, groups, times_us)
    for node in graph.nodes:
        if fxn.is_wait(node):
            streams.wait(node)
        elif node in sendings:
            streams.communicate(node, sendings[node])  # a call that only starts a collective takes no time itself
        elif times_us[node]:
            streams.compute(node, times_us[node])
    streams.finish()
    time_us = max((start_us + duration_us for _, start_us, duration_us in streams.spans.values()), default=0.0)
    return Timeline(
        time_us=time_us,
        compute_us=streams.busy_us,
        communication_us=sum(sending.time_us for sending in sendings.values()),
        exposed_us=time_us - streams.busy_us,
        spans=streams.spans,
        stalls_us=streams.stalls_us,
    )


def sendings_of(
    graph: fx.Graph, hardware: HardwareSpec, groups: Mapping[str, GroupShape], times_us: Mapping[fx.Node, float]
) -> dict[fx.Node, Sending]:
    """What each collective of a graph asks of links; ``times_us`` may hold what it takes alone.

    Raises:
        UnsupportedOpError: nothing is known of a kind or a process group.
    """
    shares = shared_links(link_uses(graph), groups, hardware)
    sendings = {}
    for node in fxn.collectives_of(graph):
        time_us = times_us.get(node) or node_collective_time_us(node, hardware, groups)
        own = shares[use_of(node)]
        moving_us = min(_moving_us(node, hardware, groups), time_us) if own else time_us
        sendings[node] = Sending(latency_us=time_us - moving_us, moving_us=moving_us, shares=own)
    return sendings


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
