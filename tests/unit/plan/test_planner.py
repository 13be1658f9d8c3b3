"""The plans that have names: their axes, parameter storage and pins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.plan import make_plan
from lightning_autoparallel.plan.parameter_storage import place_parameters
from lightning_autoparallel.plan.planner import plan_axes
from tests.support.placements import P, R, S
from tests.unit._graphs import captured

X = torch.randn(4, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(x.sum())
        y = self.linear(x) * self.scale
        return {"loss": y.square().mean(), "rows": y.detach(), "table": self.linear.weight.detach() * 2}


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"dp_shard": 4}, [("dp_shard",)]),
        ({"dp_replicate": 2, "dp_shard": 2}, [("dp_replicate", "dp_shard")]),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 1}, [("dp_replicate",)]),
        ({"dp_shard": 1}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_all_dp_axes_are_one(fake_mesh, plan: str, sizes, axes):
    assert [axis.mesh_axes for axis in plan_axes(plan, fake_mesh(**sizes))] == axes


def test_an_idle_axis_is_refused(fake_mesh):
    with pytest.raises(ConfigError, match=r"plan 'fsdp' leaves mesh axis 'tp' of size 2 idle.*set tp: 1"):
        plan_axes("fsdp", fake_mesh(dp_shard=2, tp=2))


@pytest.mark.parametrize(
    ("plan", "shape", "expected"), [("fsdp", (5, 6), S(0)), ("fsdp", (3,), S(0)), ("fsdp", (), R), ("ddp", (5, 6), R)]
)
def test_storage(fake_mesh, plan: str, shape, expected):
    axes = plan_axes(plan, fake_mesh(dp_shard=2))
    placed = place_parameters(PlanSpec.parse(plan), {"p": shape}, axes)["p"]
    assert placed.storage == (expected,) and placed.compute == (R,)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_where_values_start_and_end(fake_mesh, name: str):
    graph = captured(Model(), X, shards=2)
    plan = make_plan(graph, name, fake_mesh(dp_shard=2), print)
    stored = S(0) if name == "fsdp" else R
    assert plan.parameters == {"linear.weight": (stored,), "linear.bias": (stored,), "scale": (R,)}
    ends = {(item.kind, item.name): placed for item, placed in zip(graph.outputs, plan.outputs, strict=True)}
    assert ends[("output", "0")] == (R,)
    assert ends[("output", "1")] == (S(0),)
    assert ends[("output", "2")] == (R,)
    assert ends[("buffer", "seen")] == (R,)
    assert ends[("gradient", "linear.weight")] == (stored,)
    assert ends[("gradient", "scale")] == (R,)
    assert all(P not in (placed or ()) for placed in plan.outputs)


def test_the_batch_starts_sharded_and_parameters_whole(fake_mesh):
    graph = captured(Model(), X, shards=2)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=2), print)
    placeholders = graph.graph_module.graph.find_nodes(op="placeholder")
    for node, item in zip(placeholders, graph.inputs, strict=True):
        expected = S(0) if item.kind == "batch" else R
        if item.kind != "tangent":
            assert plan.nodes[node.name].outputs == ((expected,),)


def test_every_node_has_a_placement_for_each_argument(fake_mesh):
    graph = captured(Model(), X, shards=2)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=2), print)
    nodes = [node for node in graph.graph_module.graph.nodes if node.op != "output"]
    assert set(plan.nodes) == {node.name for node in nodes}


def test_one_process_plans_nothing(fake_mesh):
    graph = captured(Model(), X)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=1), print)
    assert plan.axes == () and set(plan.parameters.values()) == {()}
