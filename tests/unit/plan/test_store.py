"""Plan files: what is read is what was written, for the same graph and mesh only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.plan import make_plan, plan_document, read_plan, restore_plan
from tests.unit._graphs import captured

X = torch.randn(4, 6, 8)
RULES = {"0.weight": {"tp": "S(0)"}, "0.bias": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}}

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def mlp(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


@pytest.fixture
def written(fake_mesh, tmp_path: Path):
    """A plan, what it was made from, and its file."""
    spec, mesh = PlanSpec.parse({"base": "fsdp", "rules": RULES}), fake_mesh(dp_shard=2, tp=2)
    graph = captured(mlp(), X, shards=2)
    plan = make_plan(graph, spec, mesh, print)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_document(graph, plan, spec, mesh)))
    return spec, mesh, graph, plan, path


def test_a_plan_comes_back_as_it_was(written):
    spec, mesh, graph, plan, path = written
    again = restore_plan(read_plan(path), graph, spec, mesh)
    assert again == plan
    read = PlanSpec.parse(str(path))
    assert (read.base, read.rules, read.file) == (spec.base, spec.rules, str(path))
    assert (spec.name, read.name) == ("fsdp with 3 rules", f"fsdp with 3 rules of {path}")
    assert replace(spec, rules=spec.rules[:1]).name == "fsdp with 1 rule"


def test_what_stays_gathered_is_written_too(written, tmp_path: Path):
    spec, mesh, graph, plan, _ = written
    path = tmp_path / "keeping.json"
    path.write_text(json.dumps(plan_document(graph, replace(plan, keeps_gathered=True), spec, mesh)))
    assert restore_plan(read_plan(path), graph, spec, mesh).keeps_gathered and not plan.keeps_gathered


def test_a_file_is_readable(written):
    document = read_plan(written[-1])
    assert document["parameters"]["0.weight"] == ["S(0, 2 blocks)", "S(0)"]
    products = [entry for entry in document["nodes"] if "einsum" in entry["call"]]
    assert products[0]["inputs"] == [["S(0)", "R"], ["R", "S(0)"]]
    assert products[0]["outputs"] == [["S(0)", "S(2)"]]
    assert [entry["at"] for entry in document["nodes"]][:4] == [f"parameter {n}" for n in NAMES]


def test_another_graph_is_refused_by_its_first_difference(written):
    spec, mesh, _, _, path = written
    with pytest.raises(ConfigError, match=r"graph: parameter 0.weight is .*\[16, 8\].*here.*\[12, 8\].*in the file"):
        restore_plan(read_plan(path), captured(mlp(16), X, shards=2), spec, mesh)


def test_another_batch_is_refused_by_its_name(written):
    spec, mesh, _, _, path = written
    with pytest.raises(ConfigError, match=r"graph: batch is .*\[16, 6, 8\].*here.*\[8, 6, 8\].*in the file"):
        restore_plan(read_plan(path), captured(mlp(), torch.randn(8, 6, 8), shards=2), spec, mesh)


def test_a_longer_graph_is_refused(written):
    spec, mesh, graph, _, path = written
    document = read_plan(path)
    document["nodes"].pop()
    document["fingerprint"] = "another"
    with pytest.raises(ConfigError, match="nodes, this one"):
        restore_plan(document, graph, spec, mesh)


@pytest.mark.parametrize("sizes", [{"dp_shard": 4, "tp": 2}, {"tp": 2, "dp_shard": 2}], ids=["sizes", "order"])
def test_another_mesh_is_refused(written, sizes):
    """Also one whose axes come in another order, in which placements are."""
    spec, mesh, graph, _, path = written
    document = read_plan(path) | {"mesh": sizes}
    with pytest.raises(ConfigError, match=r"was made for mesh .*this job has"):
        restore_plan(document, graph, spec, mesh)


def test_rules_of_other_axes_than_the_placements_are_refused(written):
    spec, mesh, graph, _, path = written
    document = read_plan(path) | {"axes": ["dp_replicate", "dp_shard", "tp"]}
    with pytest.raises(
        ConfigError, match=r"are on axes .*'dp_replicate'.*its base and rules have \['dp_shard', 'tp'\]"
    ):
        restore_plan(document, graph, spec, mesh)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("{}", "is no plan file"), ('{"version": 9, "nodes": []}', "has version 9")],
)
def test_files_that_are_no_plans(tmp_path: Path, content: str, message: str):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_plan(path)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"plan file nowhere/plan\.json cannot be read"):
        PlanSpec.parse("nowhere/plan.json")
