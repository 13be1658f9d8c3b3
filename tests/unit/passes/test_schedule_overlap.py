"""A new order exposes less communication, needs no more memory, and computes the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from torch import fx

from lightning_autoparallel.cost.liveness import Surroundings, predict_memory
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.in_order import reorder
from lightning_autoparallel.passes.cap_compute_runs import cap_compute_runs
from lightning_autoparallel.passes.schedule_overlap import schedule_overlap
from lightning_autoparallel.passes.scheduling import Calls, ScheduleOptions, schedule
from lightning_autoparallel.passes.scheduling.known import KnownOrders, structure_of
from lightning_autoparallel.passes.scheduling.live import LiveBytes
from lightning_autoparallel.passes.scheduling.runs import RUN_BEFORE
from tests.support.lockstep import run_lockstep
from tests.unit.cost._graphs import Builder, aten
from tests.unit.passes.reductions import COSTS, WIDTH, random_graph, reduce_over

PRODUCT_US = 3 * 4 * WIDTH**2 / 1e3  # three operands through memory at 1 GB/s
REDUCED_US = 10 + 2 * 2 + 4 * WIDTH**2 / 1e3  # launch, two hops, each byte once


def _backward(layers: int) -> fx.Graph:
    """Tensor parallelism: each gradient of a weight, then that of the input, which is reduced and waited for."""
    build = Builder()
    weights = [build.input(WIDTH, WIDTH) for _ in range(layers)]
    saved = [build.input(WIDTH, WIDTH) for _ in range(layers)]
    gradient, results = build.input(WIDTH, WIDTH), []
    for weight, value in zip(weights, saved, strict=True):
        of_weight = build.call(aten.mm.default, value, gradient)
        results.append(reduce_over(build, of_weight, "dp", fxn.TERMINAL_REDUCTION))
        gradient = reduce_over(build, build.call(aten.mm.default, gradient, weight), "tp")
    return build.output(gradient, *results)


def _order(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_gradients_of_weights_run_while_gradients_of_inputs_are_reduced():
    graph = _backward(3)
    before = COSTS.timeline(graph)
    notes = schedule_overlap(graph, costs=COSTS)
    graph.lint()
    after = COSTS.timeline(graph)
    # Before, all reductions of inputs stand exposed; of those of weights too, since they are waited for at once.
    assert before.exposed_us == pytest.approx(6 * REDUCED_US)
    # A product of a weight's gradient takes longer than a reduction; what is last has nothing behind it.
    assert PRODUCT_US > REDUCED_US
    assert after.exposed_us == pytest.approx(REDUCED_US)
    assert notes[0].startswith(f"exposed {before.exposed_us / 1e3:.2f} -> {after.exposed_us / 1e3:.2f} ms, peak ")


@pytest.mark.parametrize("seen", [False, True], ids=["waited for itself", "a view of it waited for"])
def test_a_gather_that_needs_little_starts_where_its_group_is_idle(seen: bool):
    """The gather of a saved value is not started ahead of a reduction that it would hold up, but before."""
    build = Builder()
    shard, x, weight = build.input(WIDTH // 2, WIDTH), build.input(WIDTH, WIDTH), build.input(WIDTH, WIDTH)
    first = build.call(aten.mm.default, x, weight)
    second = build.call(aten.mm.default, first, weight)
    reduced = reduce_over(build, second, "tp")
    started = build.gather(build.call(aten.view.default, shard, [-1, WIDTH]), 2, "tp")
    waited = build.wait(build.call(aten.view.default, started, [WIDTH, WIDTH]) if seen else started)
    graph = build.output(build.call(aten.mm.default, reduced, waited))
    schedule_overlap(graph, costs=COSTS)
    assert started < second
    assert COSTS.timeline(graph).exposed_us == pytest.approx(REDUCED_US)


def test_no_more_is_alive_than_allowed():
    """Putting gradients of weights off keeps what they read: not where that raises the peak."""
    build = Builder()
    value, gradient = build.input(WIDTH, WIDTH), build.input(WIDTH, WIDTH)
    small = build.call(aten.sum.dim_IntList, build.call(aten.mm.default, value, gradient), [0])
    reduced = reduce_over(build, build.call(aten.mm.default, gradient, gradient), "tp")
    wide = build.call(aten.cat.default, [reduced] * 8)
    graph = build.output(small, build.call(aten.sum.default, wide))
    peak = predict_memory(graph).peak_bytes
    schedule_overlap(graph, costs=COSTS, surroundings=lambda _: Surroundings(), extra_bytes=0)
    assert predict_memory(graph).peak_bytes <= peak


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_stays_whole_and_gets_no_worse(seed: int):
    graph, same = random_graph(seed), random_graph(seed)
    before, time_us = _order(graph), COSTS.timeline(graph).time_us
    peak = predict_memory(graph, surroundings=Surroundings()).peak_bytes
    for each in (graph, same):
        schedule_overlap(each, costs=COSTS, surroundings=lambda _: Surroundings(), extra_bytes=0)
        each.lint()
    assert _order(graph) == _order(same)
    assert sorted(_order(graph)) == sorted(before)
    assert COSTS.timeline(graph).time_us <= time_us
    assert predict_memory(graph, surroundings=Surroundings()).peak_bytes <= peak


@pytest.mark.parametrize(("extra_bytes", "asked"), [(0, 2), (10**9, 1)], ids=["refused", "nothing refused"])
def test_more_room_is_tried_where_something_was_refused(extra_bytes: int, asked: int, monkeypatch: pytest.MonkeyPatch):
    """The order of all the room is the best in both cases."""
    module, asked_for = sys.modules[schedule_overlap.__module__], []

    def counted(calls: Calls, live: LiveBytes, options: ScheduleOptions, live_bytes: Sequence[int]) -> list[fx.Node]:
        asked_for.append(options.limit_bytes)
        return schedule(calls, live, options, live_bytes)

    monkeypatch.setattr(module, "schedule", counted)
    graph, free = random_graph(23), random_graph(23)
    around = Surroundings(room_bytes=10**12)
    schedule_overlap(graph, costs=COSTS, surroundings=lambda _: around, extra_bytes=extra_bytes)
    assert len(asked_for) == asked
    schedule_overlap(free, costs=COSTS, surroundings=lambda _: around, extra_bytes=10**12 - 1)
    assert _order(graph) == _order(free)


@pytest.mark.parametrize("seed", range(6))
def test_live_bytes_of_a_schedule_are_those_of_the_cost_model(seed: int):
    graph = random_graph(seed)
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    around = Surroundings(held=inputs[:1], excluded=inputs[1:2])
    live = LiveBytes(graph, around)
    for node in graph.nodes:
        live.run(node)
    assert live.peak_bytes == predict_memory(graph, surroundings=around).peak_bytes


def test_what_is_computed_does_not_change():
    groups = {"tp": [[0, 1]], "dp": [[0, 1]]}
    inputs = [[torch.randn(WIDTH, WIDTH) for _ in range(7)] for _ in range(2)]
    before = run_lockstep([_backward(3) for _ in range(2)], inputs, groups)
    graphs = [_backward(3) for _ in range(2)]
    old = _order(graphs[0])
    for graph in graphs:
        schedule_overlap(graph, costs=COSTS)
    assert _order(graphs[0]) != old
    torch.testing.assert_close(run_lockstep(graphs, inputs, groups), before, rtol=0, atol=0)


def test_random_calls_keep_their_order():
    build = Builder()
    x = build.input(WIDTH, WIDTH)
    noise = build.call(aten.bernoulli.p, build.call(aten.mm.default, x, x), 0.5)
    reduced = reduce_over(build, build.call(aten.mm.default, x, x), "tp")
    more = build.call(aten.bernoulli.p, reduced, 0.5)
    graph = build.output(noise, build.call(aten.add.Tensor, more, reduced))
    schedule_overlap(graph, costs=COSTS)
    assert noise < more


def test_a_run_that_ordering_made_longer_is_cut_to_what_it_was():
    """The product that fills what was exposed comes ahead of the first reduction, where one was: that is noted."""
    graph = _backward(3)
    reductions = [node for node in graph.nodes if fxn.collective_role(node) == fxn.TERMINAL_REDUCTION]
    schedule_overlap(graph, costs=COSTS)
    assert [node.meta[RUN_BEFORE] for node in reductions] == [1, 2, 2]
    assert _runs(graph) == [2, 2, 2]
    cap_compute_runs(graph, max_consecutive=1)
    graph.lint()
    assert _runs(graph)[0] == 1


def _runs(graph: fx.Graph) -> list[int]:
    """Products since the last gradient's reduction, at each of them."""
    runs = [0]
    for node in graph.nodes:
        if fxn.collective_role(node) == fxn.TERMINAL_REDUCTION:
            runs.append(0)
        runs[-1] += node.target is aten.mm.default
    return runs[:-1]


def test_an_order_that_gains_nothing_is_kept():
    build = Builder()
    x = build.input(WIDTH, WIDTH)
    graph = build.output(build.call(aten.mm.default, x, x))
    before = _order(graph)
    assert schedule_overlap(graph, costs=COSTS)[0].startswith("order kept; the other one: exposed 0.00 -> 0.00 ms")
    assert _order(graph) == before


def test_without_costs_nothing_moves():
    build = Builder()
    graph = build.output(reduce_over(build, build.input(4, 4), "unheard_of"))
    assert schedule_overlap(graph) == ("skipped: no costs",)
    assert "unheard_of" in schedule_overlap(graph, costs=COSTS)[0]


def test_a_graph_that_changes_its_inputs_is_left_alone():
    build = Builder()
    x = build.input(4, 4)
    graph = build.output(build.valued(x.meta["val"], aten.add_.Tensor, x, 1))
    assert schedule_overlap(graph, costs=COSTS) == ("skipped: add__tensor changes what it is given",)


def test_reorder_leaves_the_output_last():
    graph = _backward(1)
    nodes = [node for node in graph.nodes if node.op != "output"]
    reorder(graph, nodes)
    assert list(graph.nodes)[:-1] == nodes


def _copied(graph: fx.Graph, renamed: str) -> fx.Graph:
    copied, known = fx.Graph(), {}
    for node in graph.find_nodes(op="placeholder"):
        known[node] = copied.node_copy(node)
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        known[node] = copied.node_copy(node, known.__getitem__)
        known[node].name = f"{renamed}{node.name}"
    copied.output([known[node] for node in graph.output_node().args[0]])
    return copied


def test_a_graph_of_a_known_structure_is_ordered_as_the_first_was():
    graph, known = _backward(3), KnownOrders()
    same, other = _copied(graph, "x_"), _backward(4)
    notes = schedule_overlap(graph, costs=COSTS, known=known)
    assert known.times_us(graph) == COSTS.all_times_us(graph)
    assert known.find(structure_of(other), other) is None
    assert schedule_overlap(same, costs=COSTS, known=known) == notes
    assert [name.removeprefix("x_") for name in _order(same)] == _order(graph)
    assert {node.name: us for node, us in known.times_us(same).items()} == {
        node.name: us for node, us in COSTS.all_times_us(same).items()
    }


def test_another_group_is_another_structure():
    graph = _backward(2)
    before = structure_of(graph)
    reduction = next(fxn.collectives_of(graph))
    reduction.args = (*reduction.args[:-1], "another")
    assert structure_of(graph) != before
