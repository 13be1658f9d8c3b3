"""Why a plan places parameters and calls so: what the alternatives of a small model cost, and what rules them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import Explained, Explanation
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.plan import explain_rules, make_plan, make_plans, other_plans
from tests.support.slow_memory import SLOW_MEMORY
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import MESH, Blocks, costs_of


def explained(mesh: Any, pattern: str, rules: Any = None, most_solves: int = 40, **options: Any) -> Explanation:
    graph = captured(Blocks(4), torch.randn(8, 4, 16), shards=2)
    spec = {"base": "auto", "rules": rules or {}}
    plan = make_plan(graph, spec, mesh, print, costs=costs_of(mesh, SLOW_MEMORY), explains=True, **options)
    assert plan.explain is not None
    return plan.explain(pattern, most_solves)  # type: ignore[call-arg]


def only(explanation: Explanation) -> Explained:
    (choice,) = explanation.choices
    return choice


def test_parameters_of_equal_blocks_are_one_and_none_is_cheaper(fake_mesh) -> None:
    up = only(explained(fake_mesh(**MESH), "*.up.weight"))
    assert (up.what, up.count) == ("layers.*.up.weight", 4)
    costs = [other.more_us for other in up.others]
    assert costs == sorted(costs) and len(costs) == 3
    assert all(more_us > -1e-3 for more_us in costs)
    assert up.taken not in {other.way for other in up.others}


def test_a_rule_says_the_same_as_what_is_fixed(fake_mesh) -> None:
    """The oracle: plans that rules have keep parameters so cost what the explanation says."""
    mesh = fake_mesh(**MESH)
    found = only(explained(mesh, "*.down.weight"))
    other = next(other for other in found.others if not other.ruled_out)
    assert other.more_us > -1e-3
    cut = other.way.split()[1]
    graph = captured(Blocks(4), torch.randn(8, 4, 16), shards=2)
    stored = other.way.partition("{")[2].rstrip("}").split(", ")
    kept = dict(each.split(": ") for each in stored)
    rules = {"*.down.weight": {"tp": cut}, "stored:*.down.weight": kept}
    times = []
    for given in ({}, rules):
        plan = make_plan(graph, {"base": "auto", "rules": given}, mesh, print, costs=costs_of(mesh), explains=True)
        assert plan.explain is not None
        search = plan.explain.args[0].search  # type: ignore[attr-defined]
        times.append(search.problem.time_us(search.taken))
    assert times[1] - times[0] == pytest.approx(other.more_us, abs=2e-3 * times[0])


def test_of_a_plan_that_passes_prefer_it_is_said_that_the_solver_knew_a_better_one(fake_mesh, monkeypatch) -> None:
    """What costs less than it does not come from the solver's gap, as it does for its best."""
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    mesh = fake_mesh(**MESH)
    graph = captured(Blocks(4), torch.randn(8, 4, 16), shards=2)
    costs = costs_of(mesh, SLOW_MEMORY)
    best, *others = make_plans(graph, {"base": "auto"}, mesh, print, costs=costs, explains=True, with_others=True)
    assert best.explain is not None and others
    assert "as the solver reckons" not in best.explain("*.weight").note
    cheaper = []
    for plan in others:
        assert plan.explain is not None
        explanation = plan.explain("*.weight")
        assert "the best as the solver reckons, and was taken behind the passes" in explanation.note
        ways = [way for choice in explanation.choices for way in choice.others if way.more_us < -0.05]
        cheaper += ways
        assert all(way.proved for way in ways)
    assert cheaper


def test_calls_of_rows_have_no_other_way_for_that_reason(fake_mesh) -> None:
    notes = [choice.note for choice in explained(fake_mesh(dp_shard=4), "*relu*").choices]
    assert notes and set(notes) == {"every call computes a rank's rows"}


def test_calls_have_runners_up_and_equal_ones_are_one(fake_mesh) -> None:
    calls = explained(fake_mesh(**MESH), "layers.*.down").choices
    assert calls and all(each.what.startswith("layers.*.down aten.") for each in calls)
    assert any(each.count == 4 and each.others for each in calls)


def test_a_rule_that_rules_out_is_named(fake_mesh) -> None:
    up = only(explained(fake_mesh(**MESH), "*.up.weight", {"*.up.weight": {"tp": "S(1)"}}))
    assert up.taken.startswith("computed S(1) on tp")
    reasons = {other.ruled_out for other in up.others}
    assert "pinned by rule '*.up.weight'" in reasons


def test_where_a_pinned_parameter_is_kept_is_said(fake_mesh) -> None:
    rules = {"*": {"tp": "R"}, "stored:*.up.weight": {"dp_shard": "S(1)"}}
    up = only(explained(fake_mesh(**MESH), "*.up.weight", rules))
    assert "kept {dp_shard: S(1)" in up.taken, up


def test_nothing_is_solved_beyond_the_cap(fake_mesh) -> None:
    explanation = explained(fake_mesh(**MESH), "layers.*.up*", most_solves=2)
    assert "cut off after 2" in explanation.note
    assert sum(each.unsolved for each in explanation.choices) > 0


def test_a_named_plan_names_rules_and_base(fake_mesh) -> None:
    mesh = fake_mesh(**MESH)
    graph = captured(Blocks(3), torch.randn(8, 4, 16), shards=2)
    rules = {"*.up.weight": {"tp": "S(0)"}, "stored:head*": {"dp_shard": "R"}}
    spec = PlanSpec.parse({"base": "fsdp", "rules": rules})
    plan = make_plan(graph, spec, mesh, print)
    up = only(explain_rules(graph, plan, spec, "*.up.weight"))
    assert (up.what, up.count) == ("layers.*.up.weight", 3)
    assert up.note == "dp_shard: base plan 'fsdp'; tp: rule '*.up.weight'"
    head = only(explain_rules(graph, plan, spec, "head.bias"))
    assert (head.taken, head.note) == (
        "kept {dp_shard: R, tp: R}",
        "dp_shard: rule 'stored:head*'; tp: base plan 'fsdp'",
    )


def test_a_pattern_that_matches_nothing_is_refused(fake_mesh) -> None:
    with pytest.raises(ConfigError, match=r"--explain 'nope' matches no .* such as layers\.\*\.norm\.weight"):
        explained(fake_mesh(**MESH), "nope")
