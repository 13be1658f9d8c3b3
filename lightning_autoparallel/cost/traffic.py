"""Collectives under way: one after the other in each process group, beside each other where groups share a link.

What a collective takes alone is latency, in which its hops pass, and then the moving of its bytes. Those that move
bytes over the same link at the same time share its bandwidth, as each of them could use it: two communicators are two
customers of one adapter, however many streams start them. Latency is nobody's but its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from lightning_autoparallel.cost.collective import Link, link_shares
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec

_DONE_US = 1e-9  # left of a phase that is over, but for rounding
_ALL = 1 + 1e-9  # of a link

Shares = Mapping[str, Mapping[Link, float]]  # by process group, of a link's bandwidth


def shared_links(groups: Mapping[str, GroupShape], hardware: HardwareSpec) -> Shares:
    """Of each of the groups, the part that it takes of every link for which there may be more than all of it."""
    shares = {name: link_shares(shape, hardware) for name, shape in groups.items()}
    total: Counter[Link] = Counter()
    for own in shares.values():
        total.update(own)
    shared = {name: {link: part for link, part in own.items() if total[link] > _ALL} for name, own in shares.items()}
    return {name: own for name, own in shared.items() if own and len(shared) > 1}


@dataclass(kw_only=True)
class Running:
    """A collective that was started: what is left of its latency, and of moving its bytes alone."""

    node: fx.Node
    latency_us: float
    moving_us: float
    start_us: float

    @property
    def is_moving(self) -> bool:
        """Whether its bytes are under way."""
        return self.latency_us <= _DONE_US

    @property
    def left_us(self) -> float:
        """What is left of the phase that it is in."""
        return self.moving_us if self.is_moving else self.latency_us

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return self.is_moving and self.moving_us <= _DONE_US

    def go_on(self, time_us: float) -> None:
        """Spend so much of the phase that it is in."""
        if self.is_moving:
            self.moving_us -= time_us
        else:
            self.latency_us -= time_us


@dataclass
class Traffic:
    """Those that were started and are not done, by process group the one that runs first; ``shared`` is of groups."""

    shared: Shares = field(default_factory=dict)
    queues: dict[str, deque[Running]] = field(default_factory=dict)

    def start(self, group: str, running: Running) -> None:
        """Have one run behind those of its group."""
        self.queues.setdefault(group, deque()).append(running)

    @property
    def is_over(self) -> bool:
        """Whether all are done."""
        return not any(self.queues.values())

    def next_us(self) -> float | None:
        """Until one of them is done, or its bytes begin to move; None while none runs."""
        paces = self._paces()
        left_us = [queue[0].left_us / paces.get(group, 1.0) for group, queue in self.queues.items() if queue]
        return min(left_us, default=None)

    def go_on(self, time_us: float, now_us: float) -> list[tuple[str, Running]]:
        """Those that are done after some time, at most ``next_us``, that ends ``now_us``: what is next begins."""
        paces, done = self._paces(), []
        for group, queue in self.queues.items():
            if queue:
                queue[0].go_on(time_us * paces.get(group, 1.0))
            while queue and queue[0].is_done:
                done.append((group, queue.popleft()))
                if queue:
                    queue[0].start_us = now_us
        return done

    def _paces(self) -> dict[str, float]:
        """Of those that share a link now."""
        if not self.shared:
            return {}
        moving = [group for group in self.shared if (queue := self.queues.get(group)) and queue[0].is_moving]
        if len(moving) < 2:
            return {}
        used: Counter[Link] = Counter()
        for group in moving:
            used.update(self.shared[group])
        return {group: 1 / max(1.0, *(used[link] for link in self.shared[group])) for group in moving}
