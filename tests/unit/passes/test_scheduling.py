"""The scheduler by itself: what it may do to an order, and what it must not."""

from __future__ import annotations

import pytest
from torch import fx

from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.passes.scheduling import read_calls
from lightning_autoparallel.passes.scheduling.early import Room, early_places
from tests.unit.cost._graphs import ROUND, Builder, aten

COSTS = CostModel(hardware=ROUND, groups={name: GroupShape(ranks=2) for name in ("tp", "dp")})
WIDTH = 64


@pytest.mark.parametrize("seen", [False, True], ids=["waited for itself", "a view of it waited for"])
@pytest.mark.parametrize(("products", "place"), [(3, None), (4, 3)])
def test_what_needs_a_running_collective_does_not_start_before_that_is_done(
    seen: bool, products: int, place: int | None
):
    """The second gather needs the first one's result, and would be hidden behind the last of the products."""
    build = Builder()
    shard, x = build.input(4 * WIDTH, WIDTH), build.input(WIDTH, WIDTH)
    first = build.gather(shard, 2, "dp")
    view = build.call(aten.view.default, first, [8, WIDTH, WIDTH]) if seen else first
    work = [build.call(aten.mm.default, x, x) for _ in range(products)]
    whole = build.call(aten.view.default, build.wait(view), [8 * WIDTH, WIDTH])
    second = build.gather(build.call(aten.slice.Tensor, whole, 0, 0, WIDTH // 2), 2, "tp")
    graph = build.output(build.call(aten.mm.default, build.wait(second), work[-1]))
    calls = read_calls(graph, COSTS)
    assert 2 < calls.times_us[first] / calls.times_us[work[0]] < 3
    found = early_places(calls, 50, _unlimited(graph)).get(second)
    assert found == (None if place is None else calls.place[work[place]])


def _unlimited(graph: fx.Graph) -> Room:
    return Room(live_bytes=[0] * len(graph.nodes), limit_bytes=0, adds=lambda node: 0)
