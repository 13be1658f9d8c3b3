"""The streams of a schedule in the making, as ``cost.timeline`` has them where each is alone on its link."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.scheduling.calls import Calls


class Clock:
    """The compute stream's time, and when collectives begin and are done."""

    def __init__(self, calls: Calls) -> None:
        self._times_us = calls.times_us
        self.now_us = 0.0
        self._free_us: dict[str, float] = {}
        self._done_us: dict[fx.Node, float] = {}

    def left_us(self, wait: fx.Node) -> float:
        """How long a wait would hold the compute stream; 0 or less: not at all."""
        collective = fxn.waited_collective(wait)
        return 0.0 if collective is None else self.done_us(collective) - self.now_us

    def done_us(self, collective: fx.Node) -> float:
        """When a collective that has been started is done."""
        return self._done_us[collective]

    def run(self, node: fx.Node) -> None:
        """Pass the time of ``node``."""
        if fxn.is_wait(node):
            self.now_us += max(self.left_us(node), 0.0)
        elif fxn.collective_kind(node):
            group = fxn.group_of(node)
            done_us = max(self.now_us, self._free_us.get(group, 0.0)) + self._times_us[node]
            self._free_us[group] = self._done_us[node] = done_us
        else:
            self.now_us += self._times_us[node]
