"""What a step hardly takes less than: the busiest of computing, each group's stream, and what they share."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.pipeline.least_time import least_time_us
from tests.unit.cost._graphs import ROUND, Builder

SHARDS = {"pair": 800, "other": 400}  # rows of 64 bytes that a rank has, of twice as many


def least(groups: dict[str, GroupShape]) -> float:
    build = Builder()
    gathers = [build.gather(build.input(rows, 16), 2, group) for group, rows in SHARDS.items()]
    graph = build.output(*map(build.wait, gathers))

    class Graph:
        def graphs(self) -> dict[str, Any]:
            return {"forward": type("Half", (), {"graph": graph})}

    step: PartitionedGraph = Graph()  # type: ignore[assignment]
    return least_time_us(step, CostModel(hardware=ROUND, groups=groups), lambda kind, group: 2**30)


def test_the_busiest_of_groups_that_have_links_of_their_own():
    far = GroupShape(ranks=2, nodes=2)
    # half of twice as many bytes at 1 byte per ns, at a quarter of that between nodes; hardly any latency
    assert least({"pair": GroupShape(ranks=2), "other": far}) == pytest.approx(400 * 64 / 1e3 * 4, rel=1e-2)


def test_groups_on_one_link_take_the_sum():
    pair = GroupShape(ranks=2)
    assert least({"pair": pair, "other": pair}) == pytest.approx(1200 * 64 / 1e3, rel=1e-2)
