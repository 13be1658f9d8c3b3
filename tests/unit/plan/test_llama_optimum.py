"""The planner's problem of a LLaMA: its optimum against an elimination of variables, and its size at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.fx.placements import placement_text
from lightning_autoparallel.models.llama3 import Llama3
from lightning_autoparallel.models.llama3_config import Llama3Config
from lightning_autoparallel.plan import automatic, make_plan
from lightning_autoparallel.plan.axis_choices import AxisChoices
from lightning_autoparallel.plan.integer_programme import solve
from lightning_autoparallel.plan.problem import Problem
from tests.support.slow_memory import SLOW_MEMORY
from tests.support.variable_elimination import least_of_all
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import both_ways, costs_of, takes_as_much

MESH = {"dp_shard": 2, "tp": 2}
SLOW_LINKS = {**SLOW_MEMORY, "intra_node": {"bandwidth_gb_per_s": 0.1}}


class Training(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = Llama3(
            Llama3Config(dim=32, n_layers=layers, n_heads=2, n_kv_heads=2, vocab_size=64, multiple_of=32)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def searched(mesh: Any, layers: int, hardware: Mapping[str, Any], monkeypatch: Any) -> AxisChoices:
    """What there is to choose on tp."""
    seen: list[AxisChoices] = []

    class Looked(AxisChoices):
        def problem(self) -> Problem:
            seen.append(self)
            return super().problem()

    monkeypatch.setattr(automatic, "AxisChoices", Looked)
    graph = captured(Training(layers), torch.zeros(4, 16, dtype=torch.int64), shards=2)
    make_plan(graph, {"base": "auto"}, mesh, print, costs=costs_of(mesh, hardware))
    return AxisChoices(seen[0].axis, seen[0].times, seen[0].free)


@pytest.mark.parametrize("hardware", [SLOW_MEMORY, SLOW_LINKS, {"base": "h100"}], ids=["memory", "links", "h100"])
def test_two_layers_cost_the_least_that_any_combination_does(
    hardware: Mapping[str, Any], fake_mesh, monkeypatch
) -> None:
    """Without what overlaps: that joins a whole block's choices in one table."""
    every = searched(fake_mesh(**MESH), 2, hardware, monkeypatch).problem()
    assert len(every.choices) > 300
    assert max(len(value.readers) for value in every.values) > 10
    alone = dataclasses.replace(every, overlaps=())
    found = solve(alone, gap=1e-7)
    assert found.time_us > 0
    assert found.time_us == pytest.approx(least_of_all(alone).time_us, rel=1e-6)


def test_deeper_networks_are_the_same_problem(fake_mesh, monkeypatch) -> None:
    """Equal blocks decide alike: nothing more is chosen for 9 of them than for 5, and it costs what each would."""
    mesh = fake_mesh(**MESH)
    sizes = {}
    for layers in (5, 9):
        choices = searched(mesh, layers, SLOW_MEMORY, monkeypatch)
        problem = choices.problem()
        solved = solve(problem)
        sizes[layers] = len(problem.choices), len(problem.values), solved.columns, solved.rows
        tied, unrolled = both_ways(choices, solved.taken)
        assert len(unrolled.problem.choices) > 1.3 * len(tied.problem.choices)
        takes_as_much(tied, unrolled)
    assert all(more <= 1.02 * fewer for fewer, more in zip(sizes[5], sizes[9], strict=True)), sizes


def on_tp(graph: CapturedGraph, plan: ShardingPlan, shape: tuple[int, ...]) -> set[str]:
    """How sums of this shape are placed there: of the stream between blocks, and of its gradients."""
    sums = graph.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    placed = [plan.nodes[node.name].outputs[0] for node in sums if tuple(node.meta["val"].shape) == shape]
    assert placed
    return {placement_text(placements[1]) for placements in placed if placements is not None}


def test_of_long_sequences_and_few_rows_the_tokens_are_shared_out(fake_mesh) -> None:
    """One row of each data-parallel rank leaves tp the sequence; weights are small beside it, and stay whole."""
    mesh = fake_mesh(**MESH)
    graph = captured(Training(2), torch.zeros(1, 2048, dtype=torch.int64), shards=2)
    plan = make_plan(graph, {"base": "auto"}, mesh, print, costs=costs_of(mesh, SLOW_MEMORY))
    assert on_tp(graph, plan, (2, 2048, 32)) == {"S(1)"}
    assert plan.found is not None
    rules = {rule.key: dict(rule.placements) for rule in plan.found.rules}
    assert rules["*"] == {"tp": "R"}
    assert not [key for key in rules if key != "*" and not key.startswith("stored:")]
