"""A list scheduler: calls in their present order, but that what would stand still computes something else.

- A product that nothing urgent depends on (a weight's gradient) is put off if something urgent follows, within
  ``put_off`` heavy calls and for at most as many.
- Where a wait would hold the compute stream, what was put off runs first, then calls from behind it that are ready, at
  most ``max_compute_prefetch`` heavy calls ahead of their place: the next block's recomputation, and its gathers.
- Gathers of parameters whose wait was exposed start that much earlier.
- A gradient's reduction is waited for once it is done.

Nothing of that happens where live bytes would pass ``limit_bytes``. Ties go to the present order: every rank, which has
the same graph and the same costs, finds the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.scheduling.calls import Calls, is_urgent
from lightning_autoparallel.passes.scheduling.clock import Clock
from lightning_autoparallel.passes.scheduling.early import Room, early_places
from lightning_autoparallel.passes.scheduling.live import LiveBytes

_FITS = 0.5  # the share of a call that must fit into a gap for it to fill it
_RETRY = 8  # places on from where a gather found no memory


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """``max_compute_prefetch`` and ``put_off`` count heavy calls, ``limit_bytes`` is that of live bytes."""

    max_compute_prefetch: int
    put_off: int
    limit_bytes: int


def schedule(calls: Calls, live: LiveBytes, options: ScheduleOptions, live_bytes: Sequence[int]) -> list[fx.Node]:
    """The nodes of a graph in another order, in which each comes behind what it needs.

    ``live_bytes`` are those at each node of the present order; ``live`` has run none yet.
    """
    room = Room(live_bytes=live_bytes, adds=live.adds, fits=partial(live.fits, limit_bytes=options.limit_bytes))
    scheduler = _Scheduler(calls, live, options, early_places(calls, options.max_compute_prefetch, room))
    while scheduler.step():
        pass
    return scheduler.order


class _Scheduler:
    def __init__(self, calls: Calls, live: LiveBytes, options: ScheduleOptions, early: Mapping[fx.Node, int]) -> None:
        self.order: list[fx.Node] = []
        self._calls, self._live, self._options = calls, live, options
        self._clock = Clock(calls)
        self._key = {**calls.place, **early}
        self._missing = {node: len(calls.needs[node]) for node in calls.nodes}
        self._needed_by: dict[fx.Node, list[fx.Node]] = {}
        for node in calls.nodes:
            for needed in calls.needs[node]:
                self._needed_by.setdefault(needed, []).append(node)
        self._ready = sorted(self._entry(node) for node in calls.nodes if not self._missing[node])
        self._put_off: deque[tuple[fx.Node, int]] = deque()  # with the heavy calls that had run
        self._unwaited: deque[fx.Node] = deque()  # waits for reductions that nothing else needs
        # all such waits that may run, by group: what was started first is done first
        self._reducing: dict[str, dict[fx.Node, None]] = {}
        self._heavy_run = 0
        urgent = [place for node, place in calls.place.items() if is_urgent(node)]
        self._urgent_at = [calls.heavy_before[place] for place in urgent]

    def step(self) -> bool:
        """Run, put off or hold one call; False when all have run."""
        if self._put_off and self._heavy_run - self._put_off[0][1] >= self._options.put_off:
            self._run_put_off()
        elif self._ready:
            self._take(self._calls.nodes[self._ready.pop(0)[-1]])
        elif self._put_off:
            self._run_put_off()
        elif self._unwaited:
            self._run(self._unwaited.popleft())
        else:
            return False
        return True

    def _take(self, node: fx.Node) -> None:
        if self._may_be_put_off(node):
            self._put_off.append((node, self._heavy_run))
        elif self._is_final_wait(node) and self._clock.left_us(node) > 0 and self._has_room(node):
            self._unwaited.append(node)
        elif self._is_early(node) and (
            self._clock.left_us(node) > 0 if fxn.is_wait(node) else not self._has_room(node)
        ):
            self._key[node] = min(self._calls.place[node], self._key[node] + _RETRY)
            insort(self._ready, self._entry(node))
        elif fxn.is_wait(node) and self._clock.left_us(node) > 0:
            self._stand_still_or_fill(node)
        else:
            self._make_room(node)
            self._run(node)

    def _may_be_put_off(self, node: fx.Node) -> bool:
        if node not in self._calls.heavy or node in self._calls.leading or not self._has_room(node):
            return False
        here = self._calls.heavy_before[self._calls.place[node]] + 1
        following = bisect_left(self._urgent_at, here)
        return following < len(self._urgent_at) and self._urgent_at[following] - here < self._options.put_off

    def _stand_still_or_fill(self, wait: fx.Node) -> None:
        """Something else first, if there is anything; the wait is then asked again."""
        gap_us = self._clock.left_us(wait)
        if self._put_off and self._fits(self._put_off[0][0], gap_us):
            self._run_put_off()
            insort(self._ready, self._entry(wait))
            return
        found = self._ahead(wait, gap_us)
        if found is None:
            self._run(wait)
            return
        self._ready.remove(self._entry(found))
        self._run(found)
        insort(self._ready, self._entry(wait))

    def _ahead(self, wait: fx.Node, gap_us: float) -> fx.Node | None:
        calls = self._calls
        furthest = calls.heavy_before[calls.place[wait]] + self._options.max_compute_prefetch
        for *_, index in self._ready:
            node = calls.nodes[index]
            if calls.heavy_before[index] > furthest:
                return None
            is_late = fxn.is_wait(node) and self._clock.left_us(node) > 0
            if is_late or node in calls.feeding or fxn.collective_kind(node):
                continue
            if self._fits(node, gap_us) and self._has_room(node):
                return node
        return None

    def _fits(self, node: fx.Node, gap_us: float) -> bool:
        return self._calls.times_us[node] * _FITS <= gap_us

    def _has_room(self, node: fx.Node) -> bool:
        return self._live.fits(self._live.bytes + self._live.adds(node), self._options.limit_bytes)

    def _make_room(self, node: fx.Node) -> None:
        while not self._has_room(node) and self._put_off:
            self._run_put_off()
        while not self._has_room(node) and self._unwaited:
            self._run(self._unwaited.popleft())

    def _is_early(self, node: fx.Node) -> bool:
        return self._key[node] < self._calls.place[node]

    def _is_final_wait(self, node: fx.Node) -> bool:
        collective = fxn.waited_collective(node) if fxn.is_wait(node) else None
        return collective is not None and fxn.collective_role(collective) == fxn.TERMINAL_REDUCTION

    def _run_put_off(self) -> None:
        node, _ = self._put_off.popleft()
        self._run(node)

    def _run(self, node: fx.Node) -> None:
        self.order.append(node)
        if self._is_final_wait(node):
            self._reducing_with(node).pop(node, None)
        self._clock.run(node)
        self._live.run(node)
        self._heavy_run += node in self._calls.heavy
        for later in self._needed_by.get(node, ()):
            self._missing[later] -= 1
            if self._missing[later]:
                continue
            if fxn.is_getitem(later):
                self._run(later)  # at once: all results are held while one of them is still to be taken
            else:
                insort(self._ready, self._entry(later))
                if self._is_final_wait(later):
                    self._reducing_with(later)[later] = None
        for waits in list(self._reducing.values()):
            while waits and self._clock.left_us(first := next(iter(waits))) <= 0:
                self._run_done(first)

    def _reducing_with(self, wait: fx.Node) -> dict[fx.Node, None]:
        """The waits for reductions of the same group."""
        collective = fxn.waited_collective(wait)
        assert collective is not None
        return self._reducing.setdefault(fxn.group_of(collective), {})

    def _run_done(self, wait: fx.Node) -> None:
        """Wait for a reduction that is done, wherever its wait stands."""
        if wait in self._unwaited:
            self._unwaited.remove(wait)
        else:
            self._ready.remove(self._entry(wait))
        self._run(wait)

    def _entry(self, node: fx.Node) -> tuple[int, bool, int]:
        # What was given an earlier place goes ahead of what stood there.
        return self._key[node], not self._is_early(node), self._calls.place[node]
