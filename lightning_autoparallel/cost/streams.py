"""The streams that calls are started on, one after the other: ``timeline.py`` has their rules.

A graph's timeline is what they say of its present order. A scheduler, which is still to find the order, asks them in
between when a collective will be done.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.traffic import Sending, Traffic
from lightning_autoparallel.fx import nodes as fxn

Span = tuple[str, float, float]  # stream, begin and duration in microseconds
COMPUTE = "compute"  # the stream of everything but collectives; theirs have the names of their process groups


class Streams:
    """One stream that computes, and one per process group.

    ``now_us`` is where the compute stream is, ``busy_us`` what it has computed. ``spans`` has the calls that took time,
    by name, in the order in which they were started; ``stalls_us`` the collectives whose wait held the compute stream.
    """

    def __init__(self, hardware: HardwareSpec) -> None:
        self.now_us = self.busy_us = 0.0
        self.spans: dict[str, Span] = {}
        self.stalls_us: dict[str, float] = {}
        self._beside = hardware.overlap_pace  # of collectives, while something computes
        self._computing = 1 - hardware.overlap_share * hardware.overlap_pace  # its pace, while a collective runs
        self._traffic = Traffic()
        self._done_us: dict[fx.Node, float] = {}
        self._ends_us: dict[fx.Node, float] = {}  # of those that run, until something changes them

    def compute(self, node: fx.Node, duration_us: float) -> None:
        """Run a call that takes so long alone."""
        start_us, left_us = self.now_us, duration_us
        while (beside_us := self._next_done_us(self._beside)) is not None and left_us > self._computing * beside_us:
            self._pass(beside_us, self._beside)
            left_us -= self._computing * beside_us
        if beside_us is None:
            self.now_us += left_us
        elif left_us:
            self._pass(left_us / self._computing, self._beside)
        self.busy_us += self.now_us - start_us
        self._add(node, COMPUTE, start_us)

    def communicate(self, node: fx.Node, sending: Sending) -> None:
        """Start a collective."""
        self._add(node, fxn.group_of(node), self.now_us)
        self._traffic.start(fxn.group_of(node), node, sending, self.now_us)
        self._ends_us.clear()
        self._pass(0.0, 1.0)  # one that takes no time is done

    def wait(self, node: fx.Node) -> None:
        """Hold the compute stream until what ``node`` waits for is done."""
        collective, since_us = fxn.waited_collective(node), self.now_us
        while collective is not None and collective not in self._done_us:
            self._until_next()
        if collective is not None and self.now_us > since_us:
            self.stalls_us[collective.name] = self.now_us - since_us

    def finish(self) -> None:
        """Let all collectives be done."""
        while not self._traffic.is_over:
            self._until_next()

    def done_us(self, collective: fx.Node) -> float:
        """When one that was started was done, or would be if the compute stream waited for it now."""
        done_us = self._done_us.get(collective)
        if done_us is not None:
            return done_us
        if collective not in self._ends_us:
            self._ends_us[collective] = self._traffic.end_us(collective, self.now_us)
        return self._ends_us[collective]

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
        self.now_us += time_us
        if pace < 1.0:
            self._ends_us.clear()
        for group, running in self._traffic.go_on(time_us * pace, self.now_us):
            self._done_us[running.node] = self.now_us
            self._add(running.node, group, running.start_us)

    def _add(self, node: fx.Node, stream: str, start_us: float) -> None:
        """From then until now."""
        self.spans[node.name] = stream, start_us, self.now_us - start_us
