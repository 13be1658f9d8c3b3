"""A predicted timeline as lanes of spans, few enough to draw: neighbours closer than the eye sees become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_autoparallel.contracts import GraphPrediction, TimelineEvent

COMPUTE = "compute"
_FINEST_PARTS = 2400  # of a graph's time: nothing narrower is drawn on its own


@dataclass(frozen=True, kw_only=True)
class Span:
    """Calls that are drawn as one: ``busy_us`` of its width is theirs, ``longest`` takes most of it."""

    start_us: float
    end_us: float
    busy_us: float
    calls: int
    longest: str
    longest_us: float


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A stream: all its spans, and those parts of them beside which nothing computes."""

    stream: str
    spans: tuple[Span, ...]
    exposed: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The lanes of a graph, computing first, and when nothing computes."""

    lanes: tuple[Lane, ...]
    idle: tuple[Span, ...]

    @property
    def size(self) -> int:
        """How many spans there are to draw."""
        return len(self.idle) + sum(len(lane.spans) + len(lane.exposed) for lane in self.lanes)


def lanes_of(predicted: GraphPrediction, most: int) -> Lanes:
    """The lanes of a graph, as fine as ``most`` spans allow."""
    streams: dict[str, list[TimelineEvent]] = {COMPUTE: []}
    for event in sorted(predicted.events, key=lambda event: event.start_us):
        streams.setdefault(event.stream, []).append(event)
    idle = idle_times(streams[COMPUTE], predicted.time_us)
    parts = {name: list(_common(events, idle)) if name != COMPUTE else [] for name, events in streams.items()}
    drawn = Lanes(
        lanes=tuple(
            Lane(stream=name, spans=_spans(streams[name]), exposed=_spans(parts[name]))
            for name in sorted(streams, key=lambda stream: (stream != COMPUTE, stream))
        ),
        idle=_spans(idle),
    )
    resolution_us = predicted.time_us / _FINEST_PARTS
    drawn = _coarser(drawn, resolution_us)
    while drawn.size > most and resolution_us < predicted.time_us:
        resolution_us *= 2
        drawn = _coarser(drawn, resolution_us)
    return drawn


def merged(spans: Iterable[Span], resolution_us: float) -> tuple[Span, ...]:
    """Spans of one lane in their order, those too narrow to see joined with what follows closely."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is None or span.start_us - last.end_us >= resolution_us or _is_seen(last, resolution_us):
            found.append(span)
        else:
            found[-1] = _joined(last, span)
    return tuple(found)


def idle_times(computing: Sequence[TimelineEvent], end_us: float) -> list[TimelineEvent]:
    """The times up to ``end_us`` in which none of the events, which are in order, runs."""
    idle, free_us = [], 0.0
    for start_us, stop_us in (*((event.start_us, event.end_us) for event in computing), (end_us, end_us)):
        if start_us > free_us:
            idle.append(
                TimelineEvent(name="nothing computes", stream="", start_us=free_us, duration_us=start_us - free_us)
            )
        free_us = max(free_us, stop_us)
    return idle


def _common(events: Sequence[TimelineEvent], idle: Sequence[TimelineEvent]) -> Iterator[TimelineEvent]:
    """The parts of events that lie in idle times; both are in order."""
    first = 0
    for event in events:
        while first < len(idle) and idle[first].end_us <= event.start_us:
            first += 1
        for i in range(first, len(idle)):
            if idle[i].start_us >= event.end_us:
                break
            start_us = max(event.start_us, idle[i].start_us)
            yield replace(event, start_us=start_us, duration_us=min(event.end_us, idle[i].end_us) - start_us)


def _spans(events: Iterable[TimelineEvent]) -> tuple[Span, ...]:
    """A span for each event."""
    return tuple(
        Span(
            start_us=event.start_us,
            end_us=event.end_us,
            busy_us=event.duration_us,
            calls=1,
            longest=event.name,
            longest_us=event.duration_us,
        )
        for event in events
    )


def _coarser(drawn: Lanes, resolution_us: float) -> Lanes:
    lanes = tuple(
        replace(lane, spans=merged(lane.spans, resolution_us), exposed=merged(lane.exposed, resolution_us))
        for lane in drawn.lanes
    )
    return Lanes(lanes=lanes, idle=merged(drawn.idle, resolution_us))


def _is_seen(span: Span, resolution_us: float) -> bool:
    return span.end_us - span.start_us >= resolution_us


def _joined(first: Span, second: Span) -> Span:
    longer = first if first.longest_us >= second.longest_us else second
    return Span(
        start_us=first.start_us,
        end_us=max(first.end_us, second.end_us),
        busy_us=first.busy_us + second.busy_us,
        calls=first.calls + second.calls,
        longest=longer.longest,
        longest_us=longer.longest_us,
    )
