"""Whose code a graph's time is: worked out by hand, and the same in sum as the graph's own figures."""

from __future__ import annotations

import pytest
from torch import fx

from lightning_autoparallel.cost import predict_timeline
from lightning_autoparallel.pipeline.module_times import times_by_module
from tests.unit.cost._graphs import PAIR, ROUND, Builder, aten
from tests.unit.passes.reductions import COSTS, random_graph

KIB_US = 1.024
GATHER_US = 10 + 2 + 0.512  # two ranks, 1 KiB: to start, for the hop, half of it moves


def of(node: fx.Node, module: str) -> fx.Node:
    node.meta["custom"] = {"module": module}
    return node


def test_calls_and_waits_are_of_their_modules() -> None:
    """The first gather is hidden in part, nothing waits for the second, and one product is of no submodule."""
    build = Builder()
    shard, x = build.input(8, 16), build.input(16, 16)
    started = of(build.gather(shard, 2, "pair"), "layers.0")
    work = build.call(aten.mm.default, x, x)
    whole = build.wait(started)
    last = of(build.call(aten.mm.default, work, whole), "layers.0")
    turned = of(build.call(aten.neg.default, last), "layers.1")
    graph = build.output(of(build.gather(shard, 2, "pair"), "layers.1"), turned)
    timeline = predict_timeline(graph, ROUND, PAIR)
    assert times_by_module(graph, timeline) == {
        "": (pytest.approx(2 * KIB_US), pytest.approx(GATHER_US)),
        "layers.0": (pytest.approx(3 * KIB_US), pytest.approx(GATHER_US - 2 * KIB_US)),
        "layers.1": (pytest.approx(2 * KIB_US), 0.0),
    }


@pytest.mark.parametrize("seed", range(6))
def test_they_add_up_to_the_graphs_times(seed: int) -> None:
    graph = random_graph(seed)
    for number, node in enumerate(graph.nodes):
        of(node, f"part.{number % 3}")
    timeline = COSTS.timeline(graph)
    found = times_by_module(graph, timeline).values()
    assert sum(computing_us for computing_us, _ in found) == pytest.approx(timeline.compute_us)
    assert sum(exposed_us for _, exposed_us in found) == pytest.approx(timeline.exposed_us)
    assert timeline.exposed_us > 0
