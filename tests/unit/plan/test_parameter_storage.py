"""Where parameters lie: the base plan, rules on top of it, and the order in which axes cut one dim."""

from __future__ import annotations

import re

import pytest

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.plan.parameter_storage import place_parameters
from tests.support.placements import R, S

DP = PlanAxis(mesh_axes=("dp_shard",), size=4, rank=0, group_name="dp")
REPLICAS = PlanAxis(mesh_axes=("dp_replicate",), size=3, rank=0, group_name="replicas")
TP = PlanAxis(mesh_axes=("tp",), size=2, rank=0, group_name="tp")
SHAPES = {"layers.0.attention.wq.weight": (16, 8), "layers.0.attention.wo.weight": (8, 16), "norm.weight": (7,)}


def placed(plan, axes=(DP, TP), shapes=SHAPES, warn=print):
    return place_parameters(PlanSpec.parse(plan), shapes, axes, warn)


def test_a_rule_cuts_first_and_the_base_plan_inside_of_it():
    """So that gathering over dp_shard gives the contiguous tp shard."""
    wq = placed({"*.wq.weight": {"tp": "S(0)"}})["layers.0.attention.wq.weight"]
    assert wq.storage == (S(0, 2), S(0)) and wq.compute == (R, S(0))


def test_the_other_order_interleaves_the_computed_shard():
    rules = {"*.wq.weight": {"tp": "S(0)", "order": ["dp_shard", "tp"]}}
    wq = placed(rules)["layers.0.attention.wq.weight"]
    assert wq.storage == (S(0), S(0)) and wq.compute == (R, S(0, 4))


def test_the_outer_axis_of_the_mesh_needs_no_interleaving():
    wq = placed({"*.wq.weight": {"tp": "S(0)"}}, axes=(TP, DP))["layers.0.attention.wq.weight"]
    assert wq.storage == (S(0), S(0)) and wq.compute == (S(0), R)


def test_rules_pin_only_the_axes_they_name():
    plan = placed({"*.wo.weight": {"tp": "S(1)"}})
    assert plan["layers.0.attention.wo.weight"].storage == (S(0), S(1))
    assert plan["norm.weight"].storage == (S(0), R)  # 7 rows over 4 ranks: padded


def test_a_rule_for_an_axis_that_is_not_there_is_skipped():
    assert placed({"*.wo.weight": {"tp": "S(1)"}}, axes=(DP,))["layers.0.attention.wo.weight"].storage == (S(0),)


@pytest.mark.parametrize(("base", "expected"), [("ddp", (R, R, S(1))), ("hsdp", (R, S(0), S(1)))])
def test_bases_on_both_dp_axes(base: str, expected):
    plan = {"base": base, "rules": {"*.wo.weight": {"tp": "S(1)"}}}
    assert placed(plan, axes=(REPLICAS, DP, TP))["layers.0.attention.wo.weight"].storage == expected


def test_the_last_rule_that_matches_holds():
    rules = {"*.weight": {"tp": "R"}, "*.wo.weight": {"tp": "S(-1)"}}
    plan = placed(rules)
    assert plan["layers.0.attention.wo.weight"].compute == (R, S(1))
    assert plan["layers.0.attention.wq.weight"].compute == (R, R)


def test_what_cannot_be_cut_twice_is_cut_elsewhere_or_stays_whole():
    told: list[str] = []
    shapes = {"a": (6, 8), "b": (6, 7)}
    plan = placed({"?": {"tp": "S(0)"}}, shapes=shapes, warn=told.append)
    assert plan["a"].storage == (S(1), S(0))
    assert plan["b"].storage == (R, S(0))
    assert told == ["parameter 'b' of shape [6, 7] stays whole over dp_shard: its rules leave no dim that divides by 4"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.wq": {"tp": "S(0)"}}, "rule '*.wq' matches no parameter; nearest: layers.0.attention.wq.weight"),
        ({"*.wk.weight": {"tp": "S(0)"}}, "rule '*.wk.weight' matches no parameter; nearest: layers.0.attention.w"),
        ({"norm.weight": {"tp": "S(1)"}}, "rule 'norm.weight' gives 'norm.weight' S(1) of a tensor of 1 dims"),
        ({"norm.weight": {"tp": "S(0)"}}, "shares dim 0 of 'norm.weight', 7 long, among 2 ranks of tp: that is not"),
    ],
)
def test_rules_that_do_not_fit(rules, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        placed(rules)


WQ, NORM = "layers.0.attention.wq.weight", "norm.weight"


def test_what_is_computed_whole_may_lie_in_shards_of_every_axis():
    plan = placed({"stored:*.weight": {"tp": "S(0)"}}, shapes={WQ: (16, 8)})
    assert plan[WQ].storage == (S(0), S(0)) and plan[WQ].compute == (R, R)


def test_a_parameter_may_lie_whole_where_the_base_plan_shards():
    plan = placed({"stored:norm.*": {"dp_shard": "R"}})
    assert plan[NORM].storage == (R, R)
    assert plan[WQ].storage == (S(0), R)


def test_stored_rules_choose_the_dim_and_among_replicas():
    plan = {"base": "ddp", "rules": {"*.wq.weight": {"tp": "S(0)"}, "stored:*.wq.weight": {"dp_shard": "S(1)"}}}
    assert placed(plan, axes=(REPLICAS, DP, TP), shapes={WQ: (16, 8)})[WQ].storage == (R, S(1), S(0))


def test_two_axes_do_not_cut_inside_of_what_a_third_computes_with():
    """DTensor could not gather that: the first does, the other takes another dim or leaves it whole."""
    two = PlanAxis(mesh_axes=("dp_replicate",), size=2, rank=0, group_name="replicas")
    rules = {"*": {"tp": "S(1)"}, "stored:*": {"dp_replicate": "S(1)", "dp_shard": "S(1)"}}
    shapes = {"a": (3, 32), "b": (4, 32)}
    told: list[str] = []
    plan = placed(rules, axes=(two, DP, TP), shapes=shapes, warn=told.append)
    assert plan["a"].storage == (S(1, 2), R, S(1)) and plan["a"].compute == (R, R, S(1))
    assert plan["b"].storage == (S(1, 2), S(0), S(1))
    assert len(told) == 1 and "parameter 'a' of shape [3, 32] stays whole over dp_shard" in told[0]


def test_a_stored_rule_that_contradicts_what_is_computed_with():
    rules = {"*.wq.weight": {"tp": "S(0)"}, "stored:*.wq.weight": {"tp": "S(1)"}}
    with pytest.raises(ConfigError, match=r"rule 'stored:.*' has .* lie as S\(1\) on tp, but another rule .* S\(0\)"):
        placed(rules)
