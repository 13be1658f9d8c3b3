"""Local programs: every value is the rank's own on the batch axes, and only gradients of parameters are averaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.capture import capture_step, describe_call
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.placed_calls import placed_calls
from lightning_autoparallel.plan import make_plan
from tests.support.placements import R, S
from tests.unit._graphs import request_of


class Model(nn.Module):
    """Batch norm, a random draw, and one gradient that is that of two parameters and of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.shift = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.linear(x))) + self.shift + more


def call_of(module: nn.Module, *args: Any) -> CapturedGraph:
    """The call captured as a local program."""
    request = request_of(module, (args, {}), lambda batch: module(*batch[0], **batch[1]))
    layout = describe_call((args, {}), torch.device("cpu"), True)
    return capture_step(dataclasses.replace(request, layout=layout, local=True))


def sample() -> CapturedGraph:
    return call_of(Model(), torch.randn(4, 6), torch.randn(4, 8, requires_grad=True))


def launches(graph: Any) -> list[str]:
    return [f"{fxn.collective_kind(node)}" for node in fxn.collectives_of(graph)]


def test_values_are_the_ranks_own(fake_mesh):
    graph = sample()
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=2), print)
    for placed in plan.nodes.values():
        assert all(placements in (None, (R,)) for placements in (*placed.inputs, *placed.outputs))
    ends = {(item.kind, item.of, item.name): placed for item, placed in zip(graph.outputs, plan.outputs, strict=True)}
    assert ends["gradient", "parameter", "shift"] == ends["gradient", "parameter", "linear.weight"] == (S(0),)
    assert ends["gradient", "batch", "0.1"] == ends["output", "parameter", "0"] == (R,)


def test_calls_are_placed_on_no_axis_that_shares_out_the_batch(fake_mesh):
    """They are not whole there either: ranks compute different rows."""
    graph = sample()
    calls = placed_calls(graph, make_plan(graph, "fsdp", fake_mesh(dp_shard=2), print))
    assert calls and all(dict(each.placements) == {} for each in calls)


@pytest.mark.parametrize(("name", "gathers", "reduction"), [("fsdp", 5, "reduce_scatter"), ("ddp", 0, "all_reduce")])
def test_only_parameters_are_gathered_and_only_their_gradients_reduced(fake_mesh, name, gathers, reduction):
    graph = sample()
    plan = make_plan(graph, name, fake_mesh(dp_shard=2), print)
    found = launches(lower_graph(graph, plan).graph_module.graph)
    assert sorted(found) == sorted(["all_gather"] * gathers + [reduction] * 5)


def test_replicas_are_reduced_after_shards(fake_mesh):
    graph = sample()
    plan = make_plan(graph, "hsdp", fake_mesh(dp_replicate=2, dp_shard=2), print)
    found = launches(lower_graph(graph, plan).graph_module.graph)
    assert [kind for kind in found if kind != "all_gather"] == ["reduce_scatter", "all_reduce"] * 5


def test_rules_of_other_modules_do_not_matter(fake_mesh):
    rules = {"linear.weight": {"tp": "S(0)"}, "linear.bias": {"tp": "S(0)"}, "elsewhere.*": {"tp": "S(0)"}}
    graph = sample()
    plan = make_plan(graph, {"base": "fsdp", "rules": rules}, fake_mesh(dp_shard=2, tp=2), print)
    first = next(node for node in graph.graph_module.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert plan.nodes[first.name].outputs == ((R, S(1)),)
    (batch,) = [p for i, p in zip(graph.outputs, plan.outputs, strict=True) if i.of == "batch"]
    assert batch == (R, R)
