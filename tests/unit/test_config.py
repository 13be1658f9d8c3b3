"""Settings are checked where they are written, and say what to write instead."""

from __future__ import annotations

import inspect
import re

import pytest

from lightning_autoparallel import AutoParallelStrategy, parallelize, plan
from lightning_autoparallel.config import DecomposeSpec, EngineConfig, MeshSpec, PlanSpec, check_plan
from lightning_autoparallel.errors import ConfigError


def test_the_order_written_is_kept():
    spec = MeshSpec.from_mapping({"tp": 2, "dp_replicate": 1, "dp_shard": -1})
    assert spec.names == ("tp", "dp_replicate", "dp_shard")
    assert spec.sizes == (2, 1, -1)
    assert str(spec) == "{tp: 2, dp_replicate: 1, dp_shard: -1}"
    assert MeshSpec.from_mapping(spec) is spec


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({}, "mesh {} has no axis: name at least one"),
        ({"dp_shard": -1, "tp": -1}, "mesh {dp_shard: -1, tp: -1} has more than one -1"),
        ({"dp_shrad": 2}, "unknown mesh axis 'dp_shrad': did you mean 'dp_shard'?"),
        ({"pipeline": 2}, "unknown mesh axis 'pipeline': axes are dp_replicate, dp_shard, tp"),
        ({"cp": 2}, "mesh axis 'cp' is reserved"),
        ({"dp_shard": 0}, "mesh axis 'dp_shard' has size 0: give a positive number"),
        ({"dp_shard": -2}, "mesh axis 'dp_shard' has size -2"),
        ({"dp_shard": 2.0}, "mesh axis 'dp_shard' has size 2.0"),
        ({"dp_shard": True}, "mesh axis 'dp_shard' has size True"),
        ({"dp_shard": "2"}, "mesh axis 'dp_shard' has size '2'"),
    ],
)
def test_a_wrong_mesh_is_refused(mesh: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        MeshSpec.from_mapping(mesh)


@pytest.mark.parametrize(
    ("mesh", "world", "sizes"),
    [
        ({"dp_shard": -1}, 8, (8,)),
        ({"dp_replicate": 2, "dp_shard": -1, "tp": 2}, 8, (2, 2, 2)),
        ({"dp_replicate": -1, "dp_shard": 4}, 4, (1, 4)),
        ({"dp_shard": 2, "tp": 2}, 4, (2, 2)),
    ],
)
def test_minus_one_takes_what_is_left(mesh: dict, world: int, sizes: tuple[int, ...]):
    assert MeshSpec.from_mapping(mesh).resolve(world).sizes == sizes


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"dp_shard": 2, "tp": 2},
            "mesh {dp_shard: 2, tp: 2} needs 4 processes, Trainer started 2: set devices=4 or dp_shard=-1",
        ),
        ({"tp": 4}, "mesh {tp: 4} needs 4 processes, Trainer started 2: set devices=4 or tp=-1"),
        ({"dp_replicate": 1, "dp_shard": 1}, "needs 1 processes, Trainer started 2: set devices=1 or dp_shard=-1"),
        (
            {"dp_shard": -1, "tp": 4},
            "mesh {dp_shard: -1, tp: 4} cannot be filled: 2 processes do not divide by 4; start a multiple of 4",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_names_the_remedy(mesh: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        MeshSpec.from_mapping(mesh).resolve(2)


def test_plans_are_known_by_name():
    assert check_plan("fsdp") == "fsdp"
    with pytest.raises(ConfigError, match=r"unknown plan 'fsdb': plans are 'ddp', 'fsdp'.*did you mean 'fsdp'\?"):
        check_plan("fsdb")


def test_wrong_engine_settings_are_refused():
    with pytest.raises(ConfigError, match="max_captures=0"):
        EngineConfig(max_captures=0)
    for ranks in (0, 2.5, "8", True):
        with pytest.raises(ConfigError, match=f"ranks_per_node={ranks!r}: give a whole number"):
            EngineConfig(ranks_per_node=ranks)


def test_a_plan_is_a_base_and_rules():
    written = {"base": "hsdp", "rules": {"*.wq.weight": {"tp": "S(0)"}, "outputs:*.ffn": {"tp": "S( 1 )"}}}
    plan = PlanSpec.parse(written)
    assert plan.base == "hsdp"
    assert [(rule.kind, rule.pattern, rule.placements) for rule in plan.rules] == [
        ("parameter", "*.wq.weight", (("tp", "S(0)"),)),
        ("outputs", "*.ffn", (("tp", "S(1)"),)),
    ]
    assert plan.axes() == {"tp"}
    assert PlanSpec.parse(plan) is plan


def test_a_plan_is_found_unless_one_is_named():
    assert EngineConfig().plan.base == "auto"
    for takes_a_plan in (AutoParallelStrategy, parallelize, plan):
        assert inspect.signature(takes_a_plan).parameters["plan"].default == "auto"


def test_rules_alone_lie_on_top_of_auto():
    plan = PlanSpec.parse({"*.weight": {"tp": "S(0)", "order": ["dp_shard", "tp"]}})
    assert plan.base == "auto" and plan.rules[0].order == ("dp_shard", "tp")
    assert PlanSpec.parse({"rules": {"*.weight": {"tp": "S(0)"}}}).base == "auto"


def test_an_order_for_all_rules_gives_way_to_a_rule_s_own():
    rules = {"a": {"tp": "R"}, "b": {"tp": "R", "order": ["dp_shard", "tp"]}}
    plan = PlanSpec.parse({"rules": rules, "order": ["tp", "dp_shard"]})
    assert [rule.order for rule in plan.rules] == [("tp", "dp_shard"), ("dp_shard", "tp")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"base": "zero"}, "unknown plan 'zero'"),
        ({"base": "fsdp", "rule": {}}, "plan key 'rule' is unknown"),
        ({"*.weight": "S(0)"}, "rule '*.weight' is 'S(0)': give a mapping from mesh axes to placements"),
        ({"*.weight": {"tp": 0}}, "rule '*.weight' gives tp the placement 0: write 'R' or 'S(dim)'"),
        ({"*.weight": {"tp": "P(sum)"}}, "gives tp the placement 'P(sum)'"),
        (
            {"*.weight": {"dp_shard": "R"}},
            "rule '*.weight' names dp_shard: on dp_* axes every rank computes with whole parameters",
        ),
        ({"*.weight": {"tq": "R"}}, "unknown mesh axis 'tq': axes are dp_replicate, dp_shard, tp"),
        ({"*.weight": {"tp": "R", "order": "tp"}}, "has order 'tp': list the mesh axes"),
        (3, "plan 3 is neither a name"),
    ],
)
def test_plans_that_cannot_be_read(plan: object, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PlanSpec.parse(plan)


def test_how_products_are_decomposed():
    assert DecomposeSpec.parse("always") == DecomposeSpec(when="always", order="swizzle", depth=1)
    spec = DecomposeSpec.parse({"order": "broadcast", "depth": 2})
    assert (spec.when, spec.order, spec.depth) == ("auto", "broadcast", 2)
    assert DecomposeSpec.parse(spec) is spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sometimes", "unknown decompose_matmuls 'sometimes': write 'auto', 'never', 'always'"),
        ("alway", "; did you mean 'always'?"),
        (True, "unknown decompose_matmuls True"),
        ({"order": "ring"}, "unknown decompose_matmuls order 'ring': write 'swizzle', 'cyclic', 'broadcast'"),
        ({"deep": 1}, "unknown key of decompose_matmuls 'deep': write 'when', 'order', 'depth'; did you mean 'depth'?"),
        ({"depth": 0}, "decompose_matmuls depth 0: give a number of transfers, 1 or more"),
        ({"depth": "2"}, "decompose_matmuls depth '2': give a number of transfers, 1 or more"),
        ({"order": "cyclic", "depth": 2}, "decompose_matmuls order 'cyclic' with depth 2: a neighbour passes on"),
    ],
)
def test_decompositions_that_cannot_be(value: object, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DecomposeSpec.parse(value)
