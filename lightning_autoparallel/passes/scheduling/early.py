"""Where collectives that the compute stream waits for should have been started, in the present order.

What can be computed early, a parameter's shard or the norm of a saved value, is gathered while others compute. Each
gets the latest place at which its process group has nothing else to do until it is done: started right ahead of
another collective of its group it would hold that one up instead. What is gathered early is alive longer: it does not
pass calls at which there is no room for it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.scheduling.calls import Calls
from lightning_autoparallel.passes.scheduling.clock import Clock

_CHEAP = 0.5  # what must be computed early takes at most this share of the collective's time
_SPARE = 1.25  # a collective must fit so many times


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes alive at each place of the present order, what a call allocates, and whether so many may be alive."""

    live_bytes: Sequence[int]
    adds: Callable[[fx.Node], int]
    fits: Callable[[int], bool]


def early_places(calls: Calls, max_compute_prefetch: int, room: Room) -> dict[fx.Node, int]:
    """An earlier place for exposed collectives, and for the calls that they need, where there is one.

    At most ``max_compute_prefetch`` heavy calls lie between the new place and the old one.
    """
    finder = _Finder(calls, max_compute_prefetch, room)
    for collective in reversed(finder.exposed):
        finder.bring_forward(collective)
    return finder.places


class _Finder:
    def __init__(self, calls: Calls, max_compute_prefetch: int, room: Room) -> None:
        self.places: dict[fx.Node, int] = {}
        self.exposed: list[fx.Node] = []
        self._calls, self._most, self._room = calls, max_compute_prefetch, room
        self._live_bytes = list(room.live_bytes)
        self._begun_us: list[float] = []
        self._busy_us: dict[str, list[tuple[float, float]]] = {}
        self._needed_us: dict[fx.Node, float] = {}
        self._interval: dict[fx.Node, tuple[float, float]] = {}
        self._run()

    def _run(self) -> None:
        clock = Clock(self._calls)
        for node in self._calls.nodes:
            self._begun_us.append(clock.now_us)
            if fxn.is_wait(node) and clock.left_us(node) > 0:
                collective = fxn.waited_collective(node)
                if collective is not None and fxn.collective_role(collective) != fxn.TERMINAL_REDUCTION:
                    self._needed_us[collective] = clock.now_us
                    self.exposed.append(collective)
            clock.run(node)
        clock.finish()
        for node in self._calls.sendings:
            self._interval[node] = clock.interval_us(node)
            self._busy_us.setdefault(fxn.group_of(node), []).append(self._interval[node])

    def bring_forward(self, collective: fx.Node) -> None:
        """Find the latest place that hides it, and reserve its group for it from there on."""
        busy_us = self._busy_us[fxn.group_of(collective)]
        busy_us.remove(self._interval[collective])
        place = self._latest(collective, busy_us)
        if place is not None:
            begin_us = self._begun_us[place]
            self._interval[collective] = (begin_us, begin_us + self._calls.times_us[collective])
            late = self._late(collective, place) or set()
            size_bytes = sum(map(self._room.adds, late))
            for passed in range(place, self._calls.place[collective]):
                self._live_bytes[passed] += size_bytes
            for node in late:
                self.places[node] = min(place, self.places.get(node, place))
        insort(busy_us, self._interval[collective])

    def _latest(self, collective: fx.Node, busy_us: list[tuple[float, float]]) -> int | None:
        calls, wanted_us = self._calls, self._calls.times_us[collective] * _SPARE
        old, latest_us = calls.place[collective], self._needed_us[collective] - wanted_us
        place = min(old, bisect_right(self._begun_us, latest_us) - 1)
        while place >= 0 and calls.heavy_before[old] - calls.heavy_before[place] <= self._most:
            begin_us = self._begun_us[place]
            other = _overlapping(busy_us, begin_us, wanted_us)
            if other is not None:
                # the latest place from which it would be done before the other one begins
                place = min(place, bisect_right(self._begun_us, other[0] - wanted_us)) - 1
                continue
            late = self._late(collective, place)
            alive_bytes = max(self._live_bytes[place : old + 1])
            has_room = late is not None and self._room.fits(alive_bytes + sum(map(self._room.adds, late)))
            return place if has_room else None
        return None

    def _late(self, collective: fx.Node, place: int) -> set[fx.Node] | None:
        """The collective and what of its needs lies behind ``place``; None if that takes long or waits for others."""
        late: set[fx.Node] = set()
        pending, spent_us = [collective], 0.0
        while pending:
            node = pending.pop()
            if node in late or node.op != "call_function" or self._calls.place[node] < place:
                continue
            late.add(node)
            pending.extend(self._calls.needs[node])
            spent_us += self._calls.times_us[node] if node is not collective else 0.0
            others = fxn.collective_kind(node) is not None and node is not collective
            waits = fxn.is_wait(node) and not self._is_done(node, place)
            if others or waits or spent_us > _CHEAP * self._calls.times_us[collective]:
                return None
        return late

    def _is_done(self, wait: fx.Node, place: int) -> bool:
        collective = fxn.waited_collective(wait)
        if collective is None:
            return all(self._calls.place[needed] < place for needed in self._calls.needs[wait])
        return self._calls.place[collective] < place and self._interval[collective][1] <= self._begun_us[place]


def _overlapping(busy_us: list[tuple[float, float]], begin_us: float, wanted_us: float) -> tuple[float, float] | None:
    """The interval that one of this length would overlap with, the earlier one where there are two."""
    after = bisect_right(busy_us, (begin_us, float("inf")))
    if after and busy_us[after - 1][1] > begin_us:
        return busy_us[after - 1]
    return busy_us[after] if after < len(busy_us) and begin_us + wanted_us > busy_us[after][0] else None
