"""Streams say when a collective will be done, as a wait for it finds."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from torch import fx

from lightning_autoparallel.cost.streams import Streams
from lightning_autoparallel.cost.traffic import Sending
from tests.unit.cost._graphs import ROUND, Builder, aten

SHARES = ({}, {"inside": 1.0}, {"inside": 0.5, "between": 1.0})


def _started(build: Builder, choose: random.Random) -> tuple[fx.Node, fx.Node, Sending]:
    """A collective, its wait, and what it asks of links; some take no time."""
    started = build.gather(build.input(8, 16), 2, choose.choice(["a", "b", "c"]))
    latency_us, moving_us = (choose.choice([0.0, choose.uniform(0.1, 5)]) for _ in range(2))
    return (
        started,
        build.wait(started),
        Sending(latency_us=latency_us, moving_us=moving_us, shares=choose.choice(SHARES)),
    )


@pytest.mark.parametrize("pace", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_wait_takes_what_was_said_of_it(pace: float, share: float) -> None:
    """Whatever was started, computed and asked before; several of a group run one after the other."""
    choose, held = random.Random(7), 0
    for _ in range(40):
        build, streams = Builder(), Streams(replace(ROUND, overlap_pace=pace, overlap_share=share))
        x, waits = build.input(4, 4), []
        for _ in range(25):
            if choose.random() < 0.5:
                started, wait, sending = _started(build, choose)
                streams.communicate(started, sending)
                waits.append((started, wait))
            else:
                streams.compute(build.call(aten.neg.default, x), choose.uniform(0.1, 4))
            for started, wait in choose.sample(waits, min(3, len(waits))):
                said_us, now_us = streams.done_us(started), streams.now_us
                ahead = copy.copy(streams)
                ahead._traffic, ahead._done_us = _copied(streams)
                ahead.spans, ahead.stalls_us, ahead._ends_us = {}, {}, {}
                ahead.wait(wait)
                assert ahead.now_us == pytest.approx(max(said_us, now_us))
                held += ahead.now_us > now_us
    assert held > 100


def _copied(streams: Streams) -> tuple[object, dict[fx.Node, float]]:
    traffic = type(streams._traffic)()
    traffic.queues = {
        group: type(queue)(replace(running) for running in queue) for group, queue in streams._traffic.queues.items()
    }
    return traffic, dict(streams._done_us)
