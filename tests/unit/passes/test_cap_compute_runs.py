"""After ordering no long run of products lies between two reductions, unless it did before."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.cap_compute_runs import cap_compute_runs
from lightning_autoparallel.passes.scheduling.runs import RUN_BEFORE
from lightning_autoparallel.torch_compat import collectives
from tests.unit.cost._graphs import Builder, aten


def _graph(runs: list[int], own: int = 1, before: list[int] | None = None) -> fx.Graph:
    """Reductions, each behind a run of products, of which the first ``own`` are summed into what it reduces."""
    build = Builder()
    x = build.input(4, 4)
    results = []
    for index, length in enumerate(runs):
        products = [build.call(aten.mm.default, x, x) for _ in range(length)]
        total = products[0]
        for product in products[1:own]:
            total = build.call(aten.add.Tensor, total, product)
        reduced = build.valued(total.meta["val"], collectives.ALL_REDUCE, total, "sum", "g")
        reduced.meta["collective_role"] = fxn.TERMINAL_REDUCTION
        if before is not None:
            reduced.meta[RUN_BEFORE] = before[index]
        results += [build.valued(total.meta["val"], collectives.WAIT, reduced), *products]
    return build.output(*results)


def _runs(graph: fx.Graph) -> list[int]:
    nodes = list(graph.nodes)
    starts = [0, *(index for index, node in enumerate(nodes) if fxn.collective_kind(node))]
    return [sum(node.target is aten.mm.default for node in nodes[one:two]) for one, two in pairwise(starts)]


def test_a_run_that_was_shorter_is_cut():
    graph = _graph([12, 3], before=[5, 10])
    notes = cap_compute_runs(graph, max_consecutive=8)
    graph.lint()
    assert _runs(graph) == [8, 7]
    assert notes == ("at most 8 heavy calls between reductions, 1 of which started sooner",)


@pytest.mark.parametrize("before", [12, 11, None])
def test_a_run_is_no_longer_than_it_was(before: int | None):
    graph = _graph([12], before=None if before is None else [before])
    cap_compute_runs(graph, max_consecutive=8)
    assert _runs(graph) == [before or 12]


def test_what_a_reduction_needs_stays_ahead_of_it():
    graph = _graph([12], own=10, before=[5])
    notes = cap_compute_runs(graph, max_consecutive=8)
    graph.lint()
    assert _runs(graph) == [10]
    assert notes[0].endswith("1 of which started sooner, 1 of them need more themselves")


def test_what_moved_out_of_one_run_counts_in_the_next():
    graph = _graph([20, 1, 1], before=[1, 1, 1])
    cap_compute_runs(graph, max_consecutive=8)
    assert _runs(graph)[0] == 8
    assert max(_runs(graph)) <= 8


@pytest.mark.parametrize("is_random", [False, True])
def test_random_calls_are_not_moved(is_random: bool):
    """What is reduced needs a call behind all products of the run, ahead of it another random one."""
    build = Builder()
    x = build.input(4, 4)
    products = [build.call(aten.mm.default, x, x) for _ in range(12)]
    earlier = build.call(aten.bernoulli.p, x, 0.5)
    noise = build.call(aten.bernoulli.p, x, 0.5) if is_random else build.call(aten.neg.default, x)
    reduced = build.valued(x.meta["val"], collectives.ALL_REDUCE, noise, "sum", "g")
    reduced.meta |= {"collective_role": fxn.TERMINAL_REDUCTION, RUN_BEFORE: 0}
    graph = build.output(build.valued(x.meta["val"], collectives.WAIT, reduced), earlier, *products)
    notes = cap_compute_runs(graph, max_consecutive=8)
    assert (reduced < products[8]) == (noise < earlier) == (not is_random)
    assert _runs(graph) == [12 if is_random else 8]
    assert f"{int(not is_random)} of which started sooner" in notes[0]


def test_no_reductions_nothing_to_say():
    build = Builder()
    x = build.input(4, 4)
    assert cap_compute_runs(build.output(build.call(aten.mm.default, x, x))) == ()


def test_an_operator_without_a_cost_is_not_heavy():
    build = Builder()
    x = build.input(4, 4)
    own = build.valued(x.meta["val"], _a_users_own, x)
    reduced = build.valued(x.meta["val"], collectives.ALL_REDUCE, own, "sum", "g")
    reduced.meta["collective_role"] = fxn.TERMINAL_REDUCTION
    graph = build.output(build.valued(x.meta["val"], collectives.WAIT, reduced))
    assert cap_compute_runs(graph) == ()


def _a_users_own(x: Tensor) -> Tensor:
    return x
