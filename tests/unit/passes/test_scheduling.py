"""The scheduler by itself: what it may do to an order, and what it must not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from torch import fx

from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.cost.liveness import Surroundings, predict_memory
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.in_order import reorder
from lightning_autoparallel.passes.scheduling import ScheduleOptions, read_calls, schedule
from lightning_autoparallel.passes.scheduling.early import Room, early_places
from lightning_autoparallel.passes.scheduling.live import LiveBytes
from lightning_autoparallel.torch_compat import collectives
from tests.unit.cost._graphs import ROUND, Builder, aten
from tests.unit.passes.reductions import COSTS, WIDTH, random_graph, reduce_over

UNHURRIED = {"max_compute_prefetch": 100, "put_off": 0, "limit_bytes": 10**9}


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
    calls = read_calls(graph, COSTS, COSTS.all_times_us(graph))
    assert 2 < calls.times_us[first] / calls.times_us[work[0]] < 3
    found = early_places(calls, 50, _unlimited(graph)).get(second)
    assert found == (None if place is None else calls.place[work[place]])


def _unlimited(graph: fx.Graph) -> Room:
    return Room(live_bytes=[0] * len(graph.nodes), adds=lambda node: 0, fits=lambda alive_bytes: True)


def _scheduled(graph: fx.Graph, extra_bytes: int) -> tuple[int, int]:
    """The peak of a graph's new order, and that of its old one."""
    around = Surroundings()
    memory = predict_memory(graph, surroundings=around)
    limit_bytes = memory.peak_bytes + extra_bytes
    options = ScheduleOptions(max_compute_prefetch=50, put_off=16, limit_bytes=limit_bytes)
    reorder(
        graph,
        schedule(
            read_calls(graph, COSTS, COSTS.all_times_us(graph)), LiveBytes(graph, around), options, memory.live_bytes
        ),
    )
    graph.lint()
    return predict_memory(graph, surroundings=around).peak_bytes, memory.peak_bytes


def _backward(seed: int) -> fx.Graph:
    """Gradients of weights, whole or summed, beside those of inputs, reduced over tp or not; wide values between."""
    choose = random.Random(seed)
    build = Builder()
    shards = [build.input(WIDTH // 2, WIDTH) for _ in range(6)]
    saved = [build.input(WIDTH, WIDTH) for _ in range(6)]
    gradient, results = build.input(WIDTH, WIDTH), []
    for shard, value in zip(shards, saved, strict=True):
        made = build.call(aten.neg.default, build.call(aten.neg.default, shard))
        started = build.gather(made, 2, choose.choice(["dp", "tp"]))
        started.meta["collective_role"] = fxn.PARAMETER_GATHER
        weight = build.wait(started)
        of_weight = build.call(aten.mm.default, value, gradient)
        if choose.random() < 0.5:
            of_weight = build.call(aten.sum.dim_IntList, of_weight, [0])
        results.append(reduce_over(build, of_weight, "dp", fxn.TERMINAL_REDUCTION))
        gradient = build.call(aten.mm.default, gradient, weight)
        if choose.random() < 0.7:
            gradient = reduce_over(build, gradient, "tp")
        if choose.random() < 0.5:
            wide = build.call(aten.cat.default, [gradient] * choose.choice([2, 4, 8]))
            gradient = build.call(aten.mm.default, build.call(aten.t.default, wide), wide)
    return build.output(gradient, *results)


@pytest.mark.parametrize(
    ("make", "seed"),
    [(_backward, 3), (_backward, 8), (_backward, 11), (random_graph, 11), (random_graph, 16), (random_graph, 26)],
    ids=["backward 3", "backward 8", "backward 11", "reuse 11", "reuse 16", "reuse 26"],
)
def test_a_schedule_keeps_to_its_limit_where_it_would_pass_it(make: Callable[[int], fx.Graph], seed: int):
    """The first ones by what is put off, the others by what is started early."""
    free_bytes, old_bytes = _scheduled(make(seed), extra_bytes=10**9)
    peak_bytes, _ = _scheduled(make(seed), extra_bytes=0)
    assert peak_bytes <= old_bytes < free_bytes


def _order_within(graph: fx.Graph, limit_bytes: float) -> tuple[list[str], float]:
    """Names in the order of a limit, and the least that was refused."""
    options = ScheduleOptions(max_compute_prefetch=50, put_off=16, limit_bytes=int(limit_bytes))
    live, memory = LiveBytes(graph, Surroundings()), predict_memory(graph, surroundings=Surroundings())
    order = schedule(read_calls(graph, COSTS, COSTS.all_times_us(graph)), live, options, memory.live_bytes)
    return [node.name for node in order], live.refused_bytes


@pytest.mark.parametrize(("make", "seed"), [(_backward, 3), (_backward, 8), (random_graph, 11), (random_graph, 26)])
def test_the_order_is_that_of_any_limit_up_to_what_was_refused(make: Callable[[int], fx.Graph], seed: int):
    limit_bytes = predict_memory(make(seed), surroundings=Surroundings()).peak_bytes
    order, refused_bytes = _order_within(make(seed), limit_bytes)
    assert limit_bytes < refused_bytes < 10**9
    assert _order_within(make(seed), refused_bytes - 1)[0] == order
    free, nothing = _order_within(make(seed), 10**9)
    assert nothing == math.inf and free != order


def test_a_reduction_that_is_done_is_waited_for_wherever_its_wait_stands():
    """Its wait stands at the end; what it reads goes once it is done, which a running one of another group is not."""
    build = Builder()
    x = build.input(WIDTH, WIDTH)
    reductions = []
    for group, size in (("tp", 64), ("dp", 1)):
        wide = build.call(aten.cat.default, [x] * size)
        reductions.append(build.valued(wide.meta["val"], collectives.REDUCE_SCATTER, wide, "sum", 1, group))
        reductions[-1].meta["collective_role"] = fxn.TERMINAL_REDUCTION
    work = [x]
    for _ in range(6):
        work.append(build.call(aten.mm.default, work[-1], x))
    slow, quick = (build.wait(reduction) for reduction in reductions)
    graph = build.output(work[-1], slow, quick)
    times_us = COSTS.all_times_us(graph)
    assert times_us[reductions[1]] < times_us[work[1]] < 6 * times_us[work[1]] < times_us[reductions[0]]
    _scheduled(graph, extra_bytes=10**9)
    assert work[1] < quick < work[2] < work[-1] < slow


def test_an_exposed_wait_is_filled_from_behind_it():
    build = Builder()
    x = build.input(WIDTH, WIDTH)
    reduced = reduce_over(build, build.call(aten.mm.default, x, x), "tp")
    used = build.call(aten.mm.default, reduced, x)
    # the next collective's operand: nothing may put it off
    later = reduce_over(build, build.call(aten.mm.default, x, build.input(WIDTH, WIDTH)), "dp")
    (started,) = later.all_input_nodes
    graph = build.output(used, later)
    _scheduled(graph, extra_bytes=10**9)
    assert started.all_input_nodes[0] < reduced < used


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "beside another group"])
def test_a_wait_on_a_crowded_link_is_filled_for_longer(crowded: bool):
    """Groups of two ranks share the link inside of a node: each sum takes twice as long while both are under way."""
    build = Builder()
    wide = build.input(40 * WIDTH, WIDTH)
    started = [build.valued(wide.meta["val"], collectives.ALL_REDUCE, wide, "sum", group) for group in ("tp", "dp")]
    waited = build.wait(started[0])
    used = build.call(aten.neg.default, waited)
    x = build.input(WIDTH, WIDTH)
    work = [build.call(aten.mm.default, x, build.input(WIDTH, WIDTH)) for _ in range(60)]
    graph = build.output(used, *work, build.wait(started[1]))
    groups = {"tp": GroupShape(ranks=2), "dp": GroupShape(ranks=2, nodes=1 if crowded else 2)}
    costs = CostModel(hardware=ROUND, groups=groups)
    times_us = costs.all_times_us(graph)
    live, options = LiveBytes(graph, Surroundings()), ScheduleOptions(**UNHURRIED)
    reorder(graph, schedule(read_calls(graph, costs, times_us), live, options, [0] * len(graph.nodes)))
    held_us = times_us[started[0]] * (2 if crowded else 1)
    filled_us = sum(times_us[node] for node in work if node < waited)
    assert filled_us == pytest.approx(held_us, abs=times_us[work[0]]) and work[-1] > waited


@pytest.mark.parametrize("gathered", [False, True], ids=["used", "gathered"])
def test_a_wait_is_not_filled_with_what_only_makes_a_gathers_operand(gathered: bool):
    """It would be held from there to its gather, which has a place of its own."""
    build = Builder()
    shard, x = build.input(WIDTH, WIDTH), build.input(WIDTH, WIDTH)
    reduced = reduce_over(build, build.call(aten.mm.default, x, x), "tp")
    used = build.call(aten.mm.default, reduced, x)
    made = build.call(aten.neg.default, shard)
    if gathered:
        started = build.gather(made, 2, "tp")
        started.meta["collective_role"] = fxn.PARAMETER_GATHER
        last = build.call(aten.mm.default, build.wait(started), used)
    else:
        last = build.call(aten.add.Tensor, made, used)
    _scheduled(build.output(last), extra_bytes=10**9)
    assert (reduced < made) == gathered


def test_a_gather_without_room_stays_put():
    """Ahead of the product that hides it, a value of sixteen times its size is alive: that is the peak."""

    def graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
        build = Builder()
        shard, x = build.input(WIDTH // 2, WIDTH), build.input(WIDTH, WIDTH)
        wide = build.call(aten.cat.default, [x] * 16)
        hidden = build.call(aten.mm.default, build.call(aten.t.default, wide), wide)
        started = build.gather(shard, 2, "dp")
        started.meta["collective_role"] = fxn.PARAMETER_GATHER
        return build.output(build.call(aten.mm.default, hidden, build.wait(started))), started, hidden

    tight, started, hidden = graph()
    _scheduled(tight, extra_bytes=0)
    assert hidden < started
    free, started, hidden = graph()
    _scheduled(free, extra_bytes=10**9)
    assert started < hidden


def test_draws_keep_their_order_where_waiting_would_swap_them():
    """The first draw stands behind an exposed wait, which the second one could fill."""

    def graph(draw: bool) -> tuple[fx.Graph, fx.Node, fx.Node]:
        build = Builder()
        x = build.input(WIDTH, WIDTH)
        reduced = reduce_over(build, build.call(aten.mm.default, x, x), "tp")
        op = (aten.bernoulli.p, 0.5) if draw else (aten.mul.Tensor, 2)
        first, second = (build.call(op[0], value, op[1]) for value in (reduced, x))
        last = reduce_over(build, second, "tp")
        return build.output(first, last), first, second

    free, first, second = graph(draw=False)
    _scheduled(free, extra_bytes=10**9)
    assert second < first
    ordered, first, second = graph(draw=True)
    _scheduled(ordered, extra_bytes=10**9)
    assert first < second
