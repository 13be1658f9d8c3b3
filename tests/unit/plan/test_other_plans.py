"""Plans unlike the best: each fits, is nearly as good, and says something else of parameters or calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.plan import Activations, automatic, make_plan, make_plans, memory_room, other_plans
from lightning_autoparallel.plan.integer_programme import Solution
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import Blocks, costs_of

MESH = {"dp_replicate": 2, "dp_shard": 2}
H100 = {"base": "h100"}


def plans_of(mesh: Any, graph: CapturedGraph, hardware: Mapping[str, Any] = H100) -> tuple[ShardingPlan, ...]:
    return make_plans(graph, {"base": "auto"}, mesh, print, costs=costs_of(mesh, hardware))


def said(plan: ShardingPlan) -> Any:
    return dict(plan.parameters), dict(plan.nodes)


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, MESH, {"dp_shard": 2, "tp": 2}], ids=lambda axes: "x".join(axes))
def test_others_follow_the_best_and_are_unlike_it(axes: Mapping[str, int], fake_mesh, monkeypatch) -> None:
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    mesh = fake_mesh(**axes)
    graph = captured(Blocks(3, width=64, hidden=256), torch.randn(8, 4, 64), shards=4)
    plans = plans_of(mesh, graph)
    assert 1 < len(plans) <= 1 + other_plans.MOST
    alone = make_plan(graph, {"base": "auto"}, mesh, print, costs=costs_of(mesh, H100))
    assert said(plans[0]) == said(alone)
    assert all(said(one) != said(other) for i, one in enumerate(plans) for other in plans[:i])


def test_those_that_are_much_worse_are_dropped(fake_mesh, monkeypatch) -> None:
    """Nothing is better than the best; over a slow link other ways to lie take longer, unless that may be anything."""
    slow = {"base": "h100", "intra_node": {"bandwidth_gb_per_s": 0.05}}
    mesh = fake_mesh(dp_shard=4)
    graph = captured(Blocks(3, width=64, hidden=256), torch.randn(8, 4, 64), shards=4)
    monkeypatch.setattr(other_plans, "_WITHIN", 1 - 1e-3)
    assert len(plans_of(mesh, graph, slow)) == 1
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    assert len(plans_of(mesh, graph, slow)) > 1


def test_the_best_of_the_others_comes_first_and_what_has_no_solution_is_left_out(fake_mesh, monkeypatch) -> None:
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    seen: list[float] = []
    solved: list[int] = []
    real = other_plans.solve

    def failing(problem: Any, limit_s: float, most_rounds: int, most_us: float) -> Solution:
        solved.append(len(solved))
        if len(solved) == 1:
            raise InfeasiblePlanError("nothing goes together")
        return real(problem, limit_s, most_rounds=most_rounds, most_us=most_us)

    def looking(choices: Any, problem: Any, best: Any, fastest: Any) -> list[tuple[int, ...]]:
        found = other_plans.other_plans(choices, problem, best, fastest)
        seen.extend(problem.time_us(taken) for taken in (best, *found))
        return found

    monkeypatch.setattr(other_plans, "solve", failing)
    monkeypatch.setattr(automatic, "other_plans", looking)
    mesh = fake_mesh(**MESH)
    plans_of(mesh, captured(Blocks(3, width=64, hidden=256), torch.randn(8, 4, 64), shards=4))
    assert len(solved) > 2
    assert len(seen) > 1
    assert seen == sorted(seen)


def test_plans_that_are_as_fast_as_one_before_and_no_leaner_are_not_looked_at() -> None:
    """Time, then bytes."""
    same, fatter, leaner, slower = (1000.9, 99.0), (1000.02, 160.0), (1000.03, 97.0), (1010.0, 100.0)
    figures = (slower, same, fatter, (1010.1, 100.1), leaner)
    found = [(each, (number,)) for number, each in enumerate(figures)]
    assert other_plans._unlike((1000.0, 100.0), found) == [(4,), (0,)]


def test_the_fastest_is_among_them_where_a_leaner_one_is_the_best(fake_mesh, monkeypatch) -> None:
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    seen: list[tuple[Any, Any]] = []
    real = other_plans.other_plans

    def looking(choices: Any, problem: Any, best: Any, fastest: Any) -> list[tuple[int, ...]]:
        slower = real(choices, problem, best, fastest)[0]
        with monkeypatch.context() as patched:
            patched.setattr(other_plans, "_variants", lambda *_, **__: iter(()))
            seen.append((real(choices, problem, slower, fastest), [tuple(fastest)]))
        return []

    monkeypatch.setattr(automatic, "other_plans", looking)
    plans_of(fake_mesh(**MESH), captured(Blocks(3, width=64, hidden=256), torch.randn(8, 4, 64), shards=4))
    ((found, expected),) = seen
    assert found == expected


def test_where_nothing_fits_others_take_hardly_more_than_the_leanest(fake_mesh, monkeypatch) -> None:
    """What is saved by the planner's reckoning may be less behind the passes: they are shown more than one."""
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    monkeypatch.setattr(other_plans, "_HARDLY_MORE", 1.3)
    monkeypatch.setattr(other_plans, "MOST", 4)  # or the leanest plan, by which the room is told, is not among them
    monkeypatch.setattr(memory_room, "_DEAR", 1e4)  # or a leaner one that is much slower is not the leanest
    mesh = fake_mesh(dp_shard=2, tp=2)
    graph = captured(Blocks(3, width=64, hidden=256), torch.randn(8, 4, 64), shards=4)
    saved = [node.name for node in graph.graph_module.graph.nodes if node.name.startswith("relu")]
    costs = costs_of(mesh, H100)
    find = partial(make_plans, graph, {"base": "auto"}, mesh, print, costs=costs, activations=Activations(saved=saved))
    room_bytes = min(plan.stays_bytes for plan in find()) * 0.54
    assert len(find(room_bytes=room_bytes)) == 1, "it is far from that"
    monkeypatch.setattr(other_plans, "_HOPELESS", 10.0)
    plans = find(room_bytes=room_bytes)
    leanest_bytes = plans[0].stays_bytes
    assert leanest_bytes > room_bytes
    assert len(plans) > 1
    assert all(leanest_bytes <= plan.stays_bytes <= leanest_bytes * 1.3 for plan in plans)
