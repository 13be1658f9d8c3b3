"""Collectives under way: one after the other in each process group, beside each other where groups share a link.

What a collective takes alone is latency, in which its hops pass, and then the moving of its bytes. Those that move
bytes over the same link at the same time share its bandwidth, as each of them could use it: two communicators are two
customers of one adapter, however many streams start them. Latency is nobody's but its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from lightning_autoparallel.cost.collective import Link, link_shares
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec

_DONE_US = 1e-9  # left of a phase that is over, but for rounding
_ALL = 1 + 1e-9  # of a link

Use = tuple[str, str]  # a process group, and a kind of collective that it runs
Shares = Mapping[Use, Mapping[Link, float]]  # of a link's bandwidth


def shared_links(uses: Iterable[Use], groups: Mapping[str, GroupShape], hardware: HardwareSpec) -> Shares:
    """What each use takes of links that groups may want more than all of at once; unknown groups are left out."""
    shares = {use: link_shares(use[1], groups[use[0]], hardware) for use in uses if use[0] in groups}
    most: dict[Link, dict[str, float]] = {}
    for (group, _), own in shares.items():
        for link, share in own.items():
            wanted = most.setdefault(link, {})
            wanted[group] = max(share, wanted.get(group, 0.0))
    crowded = {link for link, wanted in most.items() if len(wanted) > 1 and sum(wanted.values()) > _ALL}
    return {use: {link: own[link] for link in own if link in crowded} for use, own in shares.items()}


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What a collective takes alone: latency, then the moving of its bytes, with its ``shares`` of crowded links."""

    latency_us: float
    moving_us: float
    shares: Mapping[Link, float] = field(default_factory=dict)

    @property
    def time_us(self) -> float:
        """All that it takes alone."""
        return self.latency_us + self.moving_us


@dataclass(kw_only=True)
class Running:
    """A collective that was started: what is left of its latency, and of moving its bytes alone.

    ``shares`` are those that it has then of links which others may want, too.
    """

    node: fx.Node
    latency_us: float
    moving_us: float
    start_us: float
    shares: Mapping[Link, float] = field(default_factory=dict)

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
    """Those that were started and are not done, by process group the one that runs first."""

    queues: dict[str, deque[Running]] = field(default_factory=dict)

    def start(self, group: str, node: fx.Node, sending: Sending, now_us: float) -> None:
        """Have one run behind those of its group."""
        latency_us, moving_us, shares = sending.latency_us, sending.moving_us, sending.shares
        running = Running(node=node, latency_us=latency_us, moving_us=moving_us, start_us=now_us, shares=shares)
        self.queues.setdefault(group, deque()).append(running)

    def end_us(self, node: fx.Node, now_us: float) -> float:
        """When one that was started would be done, if nothing else were started and nothing slowed it down."""
        queues = {group: iter(queue) for group, queue in self.queues.items() if queue}
        heads = {group: replace(next(queue)) for group, queue in queues.items()}
        while True:
            paces = _paces(heads)
            time_us = min(head.left_us / paces.get(group, 1.0) for group, head in heads.items())
            now_us += time_us
            for group, head in list(heads.items()):
                head.go_on(time_us * paces.get(group, 1.0))
                while heads[group].is_done:
                    if heads[group].node is node:
                        return now_us
                    if (following := next(queues[group], None)) is None:
                        del heads[group]
                        break
                    heads[group] = replace(following)

    @property
    def is_over(self) -> bool:
        """Whether all are done."""
        return not any(self.queues.values())

    def next_us(self) -> float | None:
        """Until one of them is done, or its bytes begin to move; None while none runs."""
        paces = _paces(self._heads())
        left_us = [queue[0].left_us / paces.get(group, 1.0) for group, queue in self.queues.items() if queue]
        return min(left_us, default=None)

    def go_on(self, time_us: float, now_us: float) -> list[tuple[str, Running]]:
        """Those that are done after some time, at most ``next_us``, that ends ``now_us``: what is next begins."""
        paces, done = _paces(self._heads()), []
        for group, queue in self.queues.items():
            if queue:
                queue[0].go_on(time_us * paces.get(group, 1.0))
            while queue and queue[0].is_done:
                done.append((group, queue.popleft()))
                if queue:
                    queue[0].start_us = now_us
        return done

    def _heads(self) -> dict[str, Running]:
        return {group: queue[0] for group, queue in self.queues.items() if queue}


def _paces(heads: Mapping[str, Running]) -> dict[str, float]:
    """Of those that share a link now."""
    moving = {group: head for group, head in heads.items() if head.shares and head.is_moving}
    if len(moving) < 2:
        return {}
    used: Counter[Link] = Counter()
    for head in moving.values():
        used.update(head.shares)
    return {group: 1 / max(1.0, *(used[link] for link in head.shares)) for group, head in moving.items()}
