"""The streams of a schedule in the making."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.cost.streams import Streams
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.scheduling.calls import Calls


class Clock:
    """The compute stream's time, and when collectives begin and are done."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._streams = Streams(calls.hardware)

    @property
    def now_us(self) -> float:
        """Where the compute stream is."""
        return self._streams.now_us

    def left_us(self, wait: fx.Node) -> float:
        """How long a wait would hold the compute stream; 0 or less: not at all."""
        collective = fxn.waited_collective(wait)
        return 0.0 if collective is None else self._streams.done_us(collective) - self.now_us

    def run(self, node: fx.Node) -> None:
        """Pass the time of ``node``."""
        if fxn.is_wait(node):
            self._streams.wait(node)
        elif node in self._calls.sendings:
            self._streams.communicate(node, self._calls.sendings[node])
        elif self._calls.times_us[node]:
            self._streams.compute(node, self._calls.times_us[node])

    def finish(self) -> None:
        """Let all collectives be done."""
        self._streams.finish()

    def interval_us(self, collective: fx.Node) -> tuple[float, float]:
        """From when until when one that is done had its group."""
        _, start_us, duration_us = self._streams.spans[collective.name]
        return start_us, start_us + duration_us
