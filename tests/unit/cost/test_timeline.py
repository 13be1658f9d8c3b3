"""Streams: what runs when, worked out by hand."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lightning_autoparallel.cost import CostModel, GroupShape, predict_timeline
from lightning_autoparallel.cost.streams import COMPUTE
from lightning_autoparallel.errors import UnsupportedOpError
from tests.unit.cost._graphs import PAIR, ROUND, Builder, aten

KIB_US = 1.024
# Two ranks gather 1 KiB: 10 to start, 2 for the hop, half of it moves.
GATHER_US = 10 + 2 + 0.512
PRODUCT_US = 3 * KIB_US


def events_of(timeline):
    return {event.name: (event.stream, pytest.approx(event.start_us)) for event in timeline.events}


def test_a_gather_hides_behind_what_runs_before_its_wait():
    build = Builder()
    shard, x = build.input(8, 16), build.input(16, 16)
    started = build.gather(shard, 2, "pair")
    work = build.call(aten.mm.default, x, x)
    whole = build.wait(started)
    last = build.call(aten.mm.default, work, whole)
    timeline = predict_timeline(build.output(last), ROUND, PAIR)
    assert events_of(timeline) == {
        started.name: ("pair", 0.0),
        work.name: (COMPUTE, 0.0),
        last.name: (COMPUTE, GATHER_US),
    }
    # the product of x with itself reads it once
    assert timeline.compute_us == pytest.approx(2 * KIB_US + PRODUCT_US)
    assert timeline.communication_us == pytest.approx(GATHER_US)
    assert timeline.time_us == pytest.approx(GATHER_US + PRODUCT_US)
    assert timeline.exposed_us == pytest.approx(GATHER_US - 2 * KIB_US)
    assert timeline.stalls_us == {started.name: pytest.approx(GATHER_US - 2 * KIB_US)}


@pytest.mark.parametrize("calls", [1, 12])
def test_computing_beside_a_collective_loses_a_share_of_its_time(calls: int):
    """At half the pace while the gather runs: twice as long where that is all, else half of the gather's time more."""
    build = Builder()
    shard, x = build.input(8, 16), build.input(16, 16)
    started = build.gather(shard, 2, "pair")
    work = x
    for _ in range(calls):
        work = build.call(aten.mm.default, work, x)
    graph = build.output(work, build.wait(started))
    alone_us = predict_timeline(graph, ROUND, PAIR).compute_us
    beside = predict_timeline(graph, replace(ROUND, overlap_share=0.5), PAIR)
    assert beside.compute_us == pytest.approx(min(2 * alone_us, alone_us + GATHER_US / 2))
    assert beside.communication_us == pytest.approx(GATHER_US)


def test_a_collective_beside_computing_takes_longer_and_its_wait_too():
    """At a quarter of its pace while the product runs, at its own from then on."""
    build = Builder()
    shard, x = build.input(8, 16), build.input(16, 16)
    started = build.gather(shard, 2, "pair")
    work = build.call(aten.mm.default, x, x)
    graph = build.output(work, build.wait(started))
    work_us = predict_timeline(graph, ROUND, PAIR).compute_us
    slowed = predict_timeline(graph, replace(ROUND, overlap_pace=0.25), PAIR)
    assert slowed.time_us == pytest.approx(work_us + GATHER_US - 0.25 * work_us)
    assert (slowed.compute_us, slowed.communication_us) == pytest.approx((work_us, GATHER_US))
    both = predict_timeline(graph, replace(ROUND, overlap_pace=0.5, overlap_share=0.5), PAIR)
    assert both.compute_us == pytest.approx(work_us / 0.75)
    assert both.time_us == pytest.approx(work_us / 0.75 + GATHER_US - 0.5 * work_us / 0.75)


def test_a_collective_starts_after_what_comes_before_it_on_the_compute_stream():
    build = Builder()
    shard, x = build.input(8, 16), build.input(16, 16)
    work = build.call(aten.mm.default, x, build.input(16, 16))
    started = build.gather(shard, 2, "pair")
    timeline = predict_timeline(build.output(work, build.wait(started)), ROUND, PAIR)
    assert events_of(timeline)[started.name] == ("pair", PRODUCT_US)


@pytest.mark.parametrize("several", [False, True])
def test_a_wait_behind_a_view_waits_for_the_collective(several: bool):
    build = Builder()
    started = build.gather(build.input(8, 16), 2, "pair")
    seen = build.call(aten.view.default, started, [256])
    if several:
        seen = build.call(operator.getitem, build.call(aten.split.Tensor, seen, 256), 0)
    whole = build.call(aten.view.default, build.wait(seen), [16, 16])
    last = build.call(aten.mm.default, whole, build.input(16, 16))
    timeline = predict_timeline(build.output(last), ROUND, PAIR)
    assert events_of(timeline) == {started.name: ("pair", 0.0), last.name: (COMPUTE, GATHER_US)}


def test_waiting_for_what_no_collective_gave_takes_no_time():
    build = Builder()
    product = build.call(aten.mm.default, build.input(16, 16), build.input(16, 16))
    last = build.call(aten.mm.default, build.wait(product), build.wait(build.input(16, 16)))
    timeline = predict_timeline(build.output(last), ROUND, PAIR)
    assert events_of(timeline) == {product.name: (COMPUTE, 0.0), last.name: (COMPUTE, PRODUCT_US)}


def test_groups_have_streams_of_their_own():
    build = Builder()
    shards = [build.input(8, 16) for _ in range(3)]
    started = [build.gather(shard, 2, group) for shard, group in zip(shards, ("pair", "pair", "other"), strict=True)]
    # "other" is spread over nodes, and uses another link
    groups = {"pair": GroupShape(ranks=2), "other": GroupShape(ranks=2, nodes=2)}
    timeline = predict_timeline(build.output(*(build.wait(node) for node in started)), ROUND, groups)
    far_us = 10 + 5 + 0.512 * 4
    assert [event.start_us for event in timeline.events] == pytest.approx([0.0, GATHER_US, 0.0])
    assert [event.duration_us for event in timeline.events] == pytest.approx([GATHER_US, GATHER_US, far_us])
    assert timeline.time_us == timeline.exposed_us == pytest.approx(2 * GATHER_US)
    assert timeline.communication_us == pytest.approx(2 * GATHER_US + far_us)


@pytest.mark.parametrize("later_kib", [1, 3])
def test_groups_that_send_over_one_link_share_it(later_kib: int):
    """Half of it each while both move bytes: not while the latency of one of them passes."""
    build = Builder()
    shards = [build.input(8, 16), build.input(8 * later_kib, 16)]
    started = [build.gather(shard, 2, group) for shard, group in zip(shards, ("pair", "other"), strict=True)]
    timeline = predict_timeline(build.output(*(build.wait(node) for node in started)), ROUND, PAIR)
    moving_us = 0.512
    ends = [12 + 2 * moving_us, 12 + (1 + later_kib) * moving_us]
    assert [event.duration_us for event in timeline.events] == pytest.approx(ends)
    assert timeline.time_us == pytest.approx(ends[1])
    assert timeline.communication_us == pytest.approx(2 * 12 + (1 + later_kib) * moving_us)


def test_a_collective_that_starts_later_shares_what_is_left():
    build = Builder()
    shards = [build.input(8 * 100, 16), build.input(8, 16)]
    first = build.gather(shards[0], 2, "pair")
    x = build.input(16, 16)
    work = build.call(aten.mm.default, x, x)
    second = build.gather(shards[1], 2, "other")
    timeline = predict_timeline(build.output(work, build.wait(first), build.wait(second)), ROUND, PAIR)
    durations = {event.name: event.duration_us for event in timeline.events}
    assert durations[first.name] == pytest.approx(12 + 101 * 0.512)
    assert durations[second.name] == pytest.approx(12 + 2 * 0.512)


def test_a_collective_that_nobody_waits_for_ends_the_graph():
    build = Builder()
    started = build.gather(build.input(8, 16), 2, "pair")
    assert predict_timeline(build.output(started), ROUND, PAIR).time_us == pytest.approx(GATHER_US)


def test_an_unknown_group_is_an_error():
    build = Builder()
    graph = build.output(build.wait(build.gather(build.input(8, 16), 2, "17")))
    with pytest.raises(UnsupportedOpError, match="process group '17'"):
        predict_timeline(graph, ROUND, PAIR)
    model = CostModel(hardware=ROUND, groups=PAIR)
    with pytest.raises(UnsupportedOpError, match="process group '17'"):
        model.saturating_bytes("all_gather", "17")


def test_a_cost_model_binds_hardware_and_groups():
    build = Builder()
    started = build.gather(build.input(8, 16), 2, "pair")
    product = build.call(aten.mm.default, build.wait(started), build.input(16, 16))
    graph = build.output(product)
    model = CostModel(hardware=ROUND, groups={"pair": GroupShape(ranks=2)})
    assert model.collective_time_us(started) == pytest.approx(GATHER_US)
    assert model.node_time_us(product) == pytest.approx(PRODUCT_US)
    assert model.graph_times_us(graph)[product] == pytest.approx(PRODUCT_US)
    assert model.timeline(graph).time_us == pytest.approx(GATHER_US + PRODUCT_US)
    assert model.saturating_bytes("all_gather", "pair") == pytest.approx(9 * 12 * 2000, rel=1e-3)


def alternating_graph(layers: int) -> torch.fx.Graph:
    build = Builder()
    x = build.input(64, 64, dtype=torch.bfloat16)
    for _ in range(layers):
        gathered = build.wait(build.gather(x, 1, "pair"))
        x = build.valued(x.meta["val"], aten.mul.Tensor, build.valued(x.meta["val"], aten.mm.default, x, gathered), 2)
    return build.output(x)


def python_calls_of(run: Callable[[], object]) -> int:
    """How many functions ``run`` calls, Python's and C's."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_twice_the_graph_is_twice_the_work():
    small, large = alternating_graph(200), alternating_graph(400)
    once = python_calls_of(lambda: predict_timeline(small, ROUND, PAIR))
    assert len(small.nodes) < once < 200 * len(small.nodes)  # 152 to a node on Python 3.11 and torch 2.13
    assert python_calls_of(lambda: predict_timeline(large, ROUND, PAIR)) < 2.02 * once
