"""Placements that are found: never worse than those of rules, whole blocks at once or each for itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.cost import CostModel, hardware_from, mesh_groups
from lightning_autoparallel.cost.optimizer import OptimizerState
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard, placement_text
from lightning_autoparallel.pipeline.predict import step_update_us
from lightning_autoparallel.plan import (
    Activations,
    automatic,
    axis_choices,
    make_plan,
    make_plans,
    plan_document,
    planner,
    read_plan,
    restore_plan,
)
from lightning_autoparallel.plan.automatic import first_spec
from lightning_autoparallel.plan.axis_choices import AxisChoices
from lightning_autoparallel.plan.integer_programme import GAP, solve
from lightning_autoparallel.plan.parameter_alternatives import free_parameters
from lightning_autoparallel.plan.planner import plan_axes
from lightning_autoparallel.plan.problem import Problem
from lightning_autoparallel.plan.programme import Programme
from tests.support.slow_memory import SLOW_MEMORY
from tests.unit._graphs import captured

MESH = {"dp_shard": 2, "tp": 2}
APART = {"dp_replicate": 2, "dp_shard": 2}
THREE = {**APART, "tp": 2}
SLOW_LINKS = {**SLOW_MEMORY, "memory_gb_per_s": 1e3, "intra_node": {"bandwidth_gb_per_s": 1e-3}}
MEGATRON = {"*.up.weight": {"tp": "S(0)"}, "*.up.bias": {"tp": "S(0)"}, "*.down.weight": {"tp": "S(1)"}}


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, count: int, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width, hidden) for _ in range(count)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def costs_of(mesh: Any, hardware: Mapping[str, Any] = SLOW_MEMORY) -> CostModel:
    return CostModel(hardware=hardware_from(hardware), groups=mesh_groups(mesh, 8))


def planned(
    mesh: Any, graph: CapturedGraph, rules: Mapping[str, Any] | None = None, hardware: Mapping[str, Any] = SLOW_MEMORY
) -> ShardingPlan:
    spec = {"base": "auto", "rules": dict(rules or {})}
    return make_plan(graph, spec, mesh, print, costs=costs_of(mesh, hardware))


def time_of(plan: ShardingPlan) -> float:
    """Milliseconds, as the note says."""
    (note,) = plan.notes
    return float(note.split()[4])


@dataclass(frozen=True, kw_only=True)
class Reckoned:
    """A problem, and what one solution of it takes: of time, of room throughout and of room at most."""

    problem: Problem
    time_us: float
    stays_bytes: float
    most_bytes: float


def reckoned(problem: Problem, taken: Sequence[int]) -> Reckoned:
    (limit,) = problem.limits
    return Reckoned(
        problem=problem,
        time_us=problem.time_us(taken),
        stays_bytes=limit.staying_bytes(taken),
        most_bytes=limit.size_bytes(taken),
    )


def copy_of(choices: AxisChoices, tied: bool = True) -> AxisChoices:
    known = (choices.fixed, choices.room_bytes, choices.saved, choices.recomputed)
    return AxisChoices(choices.axis, choices.times, choices.free, *known, tied=tied)


def both_ways(choices: AxisChoices, taken: Sequence[int]) -> tuple[Reckoned, Reckoned]:
    """The problem with blocks that decide alike and without, and what the same choices take in either."""
    unrolled = copy_of(choices, tied=False)
    each = unrolled.problem()
    return reckoned(choices.problem(), taken), reckoned(each, same(unrolled, each, choices, taken))


def takes_as_much(tied: Reckoned, unrolled: Reckoned) -> None:
    for name in ("time_us", "stays_bytes", "most_bytes"):
        assert getattr(unrolled, name) == pytest.approx(getattr(tied, name), rel=1e-9), name
    assert tied.time_us > 0


def solved_both_ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Reckoned, Reckoned]]:
    """To be filled with what ``both_ways`` says of everything that is solved."""
    seen = []

    class Looked(AxisChoices):
        def chosen(self, taken: Any) -> Any:
            seen.append(both_ways(copy_of(self), tuple(taken)))
            return super().chosen(taken)

    monkeypatch.setattr(automatic, "AxisChoices", Looked)
    return seen


def same(choices: AxisChoices, problem: Problem, tied: AxisChoices, tied_taken: Sequence[int]) -> list[int]:
    """The alternatives of each node that its tied ones take; what may leave in several placements does as costs least.

    By their numbers: what a gradient ends as is no part of a parameter's candidate, so that several are equal.
    """
    taken = [0] * len(problem.choices)
    for node, candidate in tied.chosen(tied_taken).items():
        number = tied_taken[tied._numbers[tied._classes[node]]]
        assert choices._candidates[node][number] == candidate
        taken[choices._numbers[choices._classes[node]]] = number
    for number in range(len(choices._numbers), len(taken)):
        ways = range(len(problem.choices[number].times_us))
        taken[number] = min(ways, key=lambda k: _read_us(problem, number, [*taken[:number], k, *taken[number + 1 :]]))
    return taken


def _read_us(problem: Problem, number: int, taken: list[int]) -> float:
    """What moving the values that a choice reads takes: of several that leave the graph each is settled by itself."""
    read = [value for value in problem.values if any(reader.choice == number for reader in value.readers)]
    return sum(value.time_us(taken) for value in read)


def test_moves_hide_what_the_parameters_of_their_part_send(fake_mesh, monkeypatch) -> None:
    """Each counts once, in the part and the direction of the call whose value is moved."""
    seen: list[AxisChoices] = []

    class Looked(AxisChoices):
        def chosen(self, taken: Any) -> Any:
            seen.append(self)
            return super().chosen(taken)

    monkeypatch.setattr(automatic, "AxisChoices", Looked)
    planned(fake_mesh(**MESH), captured(Blocks(2), torch.randn(8, 4, 16), shards=2))
    problem = seen[0].problem()
    parts = {number: overlap.name for overlap in problem.overlaps for number in overlap.moves}
    assert sum(len(overlap.moves) for overlap in problem.overlaps) == len(parts)
    named = {value.name.rpartition(".")[0]: number for number, value in enumerate(problem.values)}
    kept = {name: number for name, number in named.items() if name.startswith("relu") and number in parts}
    assert {parts[number] for number in kept.values()} == {"layers.0 forward", "layers.1 forward"}
    adds = {
        number for name, number in named.items() if name.startswith("add") and parts.get(number) == "layers.1 backward"
    }
    assert adds, "sums of gradients"
    monkeypatch.setattr(axis_choices, "_LATER", 0.0)
    names = {node: seen[0].free[node].name if node in seen[0].free else node.name for node in seen[0].nodes}
    places = {names[node]: seen[0]._repeats.places.get(node, 0.0) for node in seen[0].nodes}
    for value, alike in zip(problem.values, seen[0].problem().values, strict=True):
        made = value.name if value.name in places else value.name.rpartition(".")[0]
        more = 1 + 0.01 * places[made]
        for found, times_us in zip(value.moves_us, alike.moves_us, strict=True):
            assert found == pytest.approx(tuple(more * time_us for time_us in times_us)), "a later one takes more"


@pytest.mark.parametrize("count", [2, 5])
def test_blocks_that_decide_alike_cost_what_they_cost_each_for_itself(count: int, fake_mesh, monkeypatch) -> None:
    """The objective over tied blocks is that of the unrolled graph, where each node is a choice of its own."""
    seen = solved_both_ways(monkeypatch)
    planned(fake_mesh(**MESH), captured(Blocks(count), torch.randn(8, 4, 16), shards=2))
    ((tied, unrolled),) = seen
    assert (len(unrolled.problem.choices) > len(tied.problem.choices)) == (count == 5)
    takes_as_much(tied, unrolled)
    assert solve(unrolled.problem).time_us <= tied.time_us * (1 + GAP)


def test_what_is_found_is_no_worse_than_what_rules_say(fake_mesh) -> None:
    mesh = fake_mesh(**MESH)
    graph = captured(Blocks(3), torch.randn(8, 4, 16), shards=2)
    whole = {"*": {"tp": "R"}}
    times = {name: time_of(planned(mesh, graph, rules)) for name, rules in {"R": whole, "tp": MEGATRON}.items()}
    found = time_of(planned(mesh, graph))
    assert found <= min(times.values()) * (1 + GAP) + 0.01, (found, times)


def test_a_wide_perceptron_is_cut_as_megatron_does(fake_mesh) -> None:
    """Few rows and large weights: hidden units are shared out, and one small sum is reduced."""
    graph = captured(Blocks(1, width=256, hidden=4096), torch.randn(2, 1, 256), shards=2)
    plan = planned(fake_mesh(**MESH), graph, hardware={**SLOW_MEMORY, "intra_node": {"bandwidth_gb_per_s": 10.0}})
    on_tp = {name: placement_text(placements[1]) for name, placements in plan.parameters.items()}
    assert on_tp["layers.0.up.weight"] == "S(0)"
    assert on_tp["layers.0.down.weight"] == "S(1)"
    assert "nothing is cut" not in plan.notes[0]


def test_latency_alone_leaves_everything_whole(fake_mesh) -> None:
    graph = captured(Blocks(2), torch.randn(8, 4, 16), shards=2)
    mesh = fake_mesh(**MESH)
    plan = planned(mesh, graph, hardware={"base": "h100"})
    on_tp = {placement_text(placements[1]) for placements in plan.parameters.values()}
    assert on_tp == {"R"}
    assert "nothing is cut by tp, each of its 2 ranks computes the same" in plan.notes[0]
    # On dp_shard what is hidden behind computing costs nothing, so that single parameters may lie in shards as well.
    rules = {"*": {"tp": "R"}, "stored:*": {"dp_shard": "R", "tp": "R"}}
    whole = planned(mesh, graph, rules, hardware={"base": "h100"})
    assert time_of(plan) == time_of(whole)


def test_each_plan_says_how_far_from_the_best_it_is_itself(fake_mesh, monkeypatch) -> None:
    seen: list[automatic.FoundAxis] = []

    def find_axis(*arguments: Any) -> tuple[automatic.FoundAxis, ...]:
        found = automatic.find_axis(*arguments[:6], True, *arguments[7:])
        seen.extend(found if not arguments[1].shards_batch else ())
        return found[:1]

    monkeypatch.setattr(planner, "find_axis", find_axis)
    planned(fake_mesh(**MESH), captured(Blocks(2), torch.randn(8, 4, 16), shards=2), hardware=SLOW_LINKS)
    assert len(seen) > 1
    for each in seen:
        time_us = each.search.problem.time_us(each.search.taken)
        assert each.note.startswith(f"plan auto on tp: {time_us / 1e3:.2f} ms")
        solved, programme = each.search.solved, Programme(each.search.problem)
        assert (solved.axis, solved.time_us, solved.gap_us) == ("tp", time_us, max(time_us - solved.bound_us, 0.0))
        assert (solved.columns, solved.rows) == (len(programme.costs), len(programme.rows))
        assert f"at most {100 * solved.gap_us / time_us:.2f} % above the best" in each.note


def test_rules_are_kept(fake_mesh) -> None:
    graph = captured(Blocks(3), torch.randn(8, 4, 16), shards=2)
    plan = planned(fake_mesh(**MESH), graph, {"*.up.weight": {"tp": "S(1)"}})
    ups = [placements[1] for name, placements in plan.parameters.items() if name.endswith("up.weight")]
    assert {placement_text(placement) for placement in ups} == {"S(1)"}


@pytest.mark.parametrize(
    ("sizes", "pins", "hardware"),
    [
        (MESH, {}, SLOW_MEMORY),
        (MESH, {"stored:*": {"dp_shard": "R"}}, SLOW_MEMORY),
        (MESH, {"*": {"tp": "R"}, "stored:layers.*.up.weight": {"dp_shard": "S(1)"}}, SLOW_MEMORY),
        # not free, as no alternative lies so, or in such an order
        (MESH, {"head.weight": {"tp": "S(0)"}, "stored:head.weight": {"dp_shard": "S(1)"}}, SLOW_MEMORY),
        (MESH, {"layers.1.up.weight": {"tp": "S(0)", "order": ["tp", "dp_shard"]}}, SLOW_MEMORY),
        # nor as the others of its kind
        (MESH, {"layers.*.up.weight": {"tp": "R"}, "layers.1.up.weight": {"tp": "S(0)", "order": ["tp"]}}, SLOW_LINKS),
        (THREE, {"*.up.weight": {"tp": "S(0)", "order": ["dp_shard", "tp"]}}, SLOW_MEMORY),
        # found under this key too, whole on both axes
        (APART, {"stored:layers.*.up.weight": {"dp_replicate": "R"}}, SLOW_LINKS),
    ],
)
def test_what_is_found_comes_back_from_a_file(fake_mesh, tmp_path, sizes, pins, hardware) -> None:
    mesh = fake_mesh(**sizes)
    graph = captured(Blocks(3), torch.randn(8, 4, 16), shards=2 if sizes is MESH else 4)  # of the batch
    plan = planned(mesh, graph, pins, hardware)
    assert plan.found is not None
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_document(graph, plan, plan.found, mesh)))
    spec = PlanSpec.parse(str(path))
    assert spec.base == "fsdp"
    again = restore_plan(read_plan(path), graph, spec, mesh)
    assert (again.nodes, again.parameters, again.outputs) == (plan.nodes, plan.parameters, plan.outputs)
    by_rules = make_plan(graph, replace(spec, file=None), mesh, print)
    assert by_rules.parameters == plan.parameters, "the rules alone place parameters so, for other steps"


class Named(nn.Module):
    """A number, and a parameter whose name holds what patterns are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.odd = nn.ParameterDict({"a[0]": nn.Parameter(torch.randn(512, 16))})
        self.up = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.odd["a[0]"].t()).square().mean() * self.scale + self.up(x).square().mean()


@pytest.mark.parametrize("rules", [{}, {"stored:*": {"dp_shard": "S(0)"}}])
def test_numbers_and_odd_names_are_placed_too(fake_mesh, rules) -> None:
    mesh = fake_mesh(**MESH)
    graph = captured(Named(), torch.randn(8, 4, 16), shards=2)
    plan = make_plan(graph, {"base": "auto", "rules": rules}, mesh, print, costs=costs_of(mesh), room_bytes=1.2e5)
    assert plan.found is not None
    read = PlanSpec.parse(plan.found.as_written())
    assert make_plan(graph, read, mesh, print).parameters == plan.parameters
    assert any(is_shard(placement) for placement in plan.parameters["odd.a[0]"])
    assert not any(is_shard(placement) for placement in plan.parameters["scale"])


def test_before_a_plan_is_found_parameters_lie_over_all_ranks(fake_mesh) -> None:
    mesh = fake_mesh(**MESH)
    rules = {rule.key: dict(rule.placements) for rule in first_spec(PlanSpec.parse("auto"), mesh).rules}
    assert rules == {"*": {"tp": "R"}, "stored:*": {"dp_shard": "S(0)", "tp": "S(0)"}}
    mine = PlanSpec.parse({"base": "auto", "rules": {"*.up.weight": {"tp": "S(0)"}}})
    kept = {rule.key: dict(rule.placements) for rule in first_spec(mine, mesh).rules}
    assert kept == {"stored:*": {"dp_shard": "S(0)"}, "*.up.weight": {"tp": "S(0)"}}


def kept_bytes(graph: CapturedGraph, plan: ShardingPlan) -> float:
    """Of parameters, their gradients and two moments on one rank."""
    nodes = graph.graph_module.graph.find_nodes(op="placeholder")
    total = 0.0
    for node, item in zip(nodes, graph.inputs, strict=True):
        if item.kind == "parameter":
            cuts = [a.size for p, a in zip(plan.parameters[item.name], plan.axes, strict=True) if is_shard(p)]
            total += 4 * node.meta["val"].numel() * 4 / math.prod(cuts)
    return total


def test_what_stays_on_a_rank_has_room(fake_mesh) -> None:
    """Over slow links much room leaves parameters whole, as data parallelism has them; less has ranks share them.

    A bias may be shared out for nothing: no backward reads it, so that it is gathered once and scattered once.
    """
    graph = captured(Blocks(3), torch.randn(8, 4, 16), shards=4)
    mesh = fake_mesh(dp_replicate=2, dp_shard=2)
    plans = {
        room: make_plan(graph, "auto", mesh, print, costs=costs_of(mesh, SLOW_LINKS), room_bytes=room)
        for room in (math.inf, 7e4, 4e4)
    }
    whole = kept_bytes(graph, plans[math.inf])
    weights = [placed for name, placed in plans[math.inf].parameters.items() if "bias" not in name]
    assert {placement_text(p) for placements in weights for p in placements} == {"R"}
    assert whole > 7e4 >= kept_bytes(graph, plans[7e4]) > 4e4 >= kept_bytes(graph, plans[4e4]) > 0
    with pytest.raises(InfeasiblePlanError, match=r"no plan .* at least .* GiB .* more ranks"):
        make_plan(graph, "auto", mesh, print, costs=costs_of(mesh, SLOW_LINKS), room_bytes=whole / 5)


def test_what_is_recomputed_has_room_while_it_is_there(fake_mesh) -> None:
    """Of hidden values of three blocks saved ones are all there at once, recomputed ones only where they meet.

    Where a block's have no room whole, they are cut though that takes longer over slow links.
    """
    mesh, graph = fake_mesh(**MESH), captured(Blocks(3), torch.randn(64, 64, 16), shards=2)
    hidden = [node for node in graph.graph_module.graph.nodes if node.name.startswith("relu")]
    (hidden_bytes,) = {fxn.size_bytes(node.meta["val"]) / mesh.data_parallel_size for node in hidden}
    names = [node.name for node in hidden]
    find = partial(make_plans, graph, "auto", mesh, print, costs=costs_of(mesh, SLOW_LINKS), with_others=False)
    alone = Activations(recomputed=[[name] for name in names])
    reads = (Activations(), alone, Activations(recomputed=[names]), Activations(saved=names))
    neither, recomputed, met, saved = (find(activations=read)[0] for read in reads)
    assert recomputed.stays_bytes == neither.stays_bytes + hidden_bytes
    assert saved.stays_bytes == met.stays_bytes == neither.stays_bytes + 3 * hidden_bytes
    (tight,) = find(activations=alone, room_bytes=neither.stays_bytes + 0.9 * hidden_bytes)
    for plan, text in ((recomputed, "R"), (tight, "S(1)")):
        lying = [plan.nodes[name].outputs[0] for name in names]
        assert {placement_text(placements[1]) for placements in lying if placements is not None} == {text}


class Table(nn.Module):
    """A table that is looked up in, and a matrix of the same size that is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.matrix = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix(self.table(tokens)).square().mean()


def test_a_table_is_gathered_once_and_a_matrix_for_the_backward_too(fake_mesh) -> None:
    """Of a look-up the backward reads the indices only; both gradients take as long to scatter."""
    mesh = fake_mesh(dp_shard=4)
    graph = captured(Table(), torch.zeros(8, 4, dtype=torch.long), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    (axis,) = plan_axes("auto", mesh)
    free = free_parameters(graph, placeholders, axis, [axis], mesh, costs_of(mesh))
    ways = {one.name: next(way for way in one.ways if way.stored) for one in free.values()}
    table, matrix = ways["table.weight"], ways["matrix.weight"]
    assert table.gathered_us == matrix.gathered_us > 0
    assert matrix.reduced_us - table.reduced_us == pytest.approx(table.gathered_us)


def test_what_stays_gathered_is_gathered_once_and_has_room_until_the_backward(fake_mesh) -> None:
    """By hand: beside a quarter of four copies in float32 a rank holds all of the matrix, and scatters a gradient."""
    mesh = fake_mesh(dp_shard=4)
    graph = captured(Table(), torch.zeros(8, 4, dtype=torch.long), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    (axis,) = plan_axes("auto", mesh)
    free = free_parameters(graph, placeholders, axis, [axis], mesh, costs_of(mesh), gathered_again=False)
    ways = {one.name: {bool(way.stored): way for way in one.ways} for one in free.values()}
    table, matrix = ways["table.weight"], ways["matrix.weight"]
    assert matrix[True].reduced_us == table[True].reduced_us
    whole = 64 * 16 * 4
    assert (table[True].size_bytes, matrix[True].size_bytes) == (whole, 2 * whole)
    assert (table[True].passing_bytes, matrix[True].passing_bytes) == (2 * whole + whole * 3 / 4, whole * 3 / 4)
    assert (table[False].size_bytes, matrix[False].size_bytes) == (4 * whole, 4 * whole)


def test_rows_that_do_not_divide_are_padded_or_columns_are_put_together_by_a_copy(fake_mesh) -> None:
    """By hand: of 66 rows of 16 a rank of 4 keeps 17, or 4 columns of all; the copy is of all, in float32."""
    mesh = fake_mesh(dp_shard=4)
    module = Table()
    module.table, module.matrix = nn.Embedding(66, 16), nn.Linear(16, 66, bias=False)
    graph = captured(module, torch.zeros(8, 4, dtype=torch.long), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    (axis,) = plan_axes("auto", mesh)
    costs = costs_of(mesh)
    free = free_parameters(graph, placeholders, axis, [axis], mesh, costs)
    copies = {"table.weight": 1, "matrix.weight": 2}
    for parameter in free.values():
        rows, columns = (next(way for way in parameter.ways if way.stored == {"dp_shard": dim}) for dim in (0, 1))
        assert (rows.size_bytes, columns.size_bytes) == (17 * 16 * 4 * 4, 66 * 4 * 4 * 4)
        copied_us = costs.hardware.copy_time_us(66 * 16 * 4) * copies[parameter.name]
        assert (rows.copied_us, columns.copied_us) == (0.0, pytest.approx(copied_us))
        assert all(
            one.time_us == way.update_us + way.copied_us
            for one, way in zip(parameter.candidates, parameter.ways, strict=True)
        )


def test_a_micro_batch_has_its_share_of_the_update(fake_mesh) -> None:
    """By hand: AdamW moves seven tensors as large as what a rank keeps, once for four micro-batches."""
    mesh = fake_mesh(dp_shard=4)
    graph = captured(Table(), torch.zeros(8, 4, dtype=torch.long), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    (axis,) = plan_axes("auto", mesh)
    costs = costs_of(mesh)
    state = OptimizerState(micro_batches=4)
    free = free_parameters(graph, placeholders, axis, [axis], mesh, costs, state)
    bytes_per_us = (costs.hardware.optimizer_gb_per_s or costs.hardware.achieved_gb_per_s) * 1e3
    for parameter in free.values():
        for way in parameter.ways:
            kept = 64 * 16 * 4 / (4 if way.stored else 1)
            assert way.update_us == pytest.approx(7 * kept / bytes_per_us / 4)
    plan = planned(mesh, graph)
    whole_us, share_us = (step_update_us(graph, plan, costs, each) for each in (OptimizerState(), state))
    assert whole_us == pytest.approx(4 * share_us) and share_us > 0


class Tied(nn.Module):
    """A table that is looked up as it is and multiplied with in half of its bytes, unless it is only ``multiplied``."""

    def __init__(self, multiplied: bool = False) -> None:
        super().__init__()
        self.table, self.multiplied = nn.Embedding(64, 16), multiplied

    def forward(self, tokens: Tensor) -> Tensor:
        values = tokens[..., None].expand(-1, -1, 16).float() if self.multiplied else self.table(tokens)
        product = nn.functional.linear(values.bfloat16(), self.table.weight.bfloat16())
        return product.float().square().mean()


@pytest.mark.parametrize(("multiplied", "itemsize"), [(True, 2), (False, 4)])
def test_a_parameter_is_gathered_in_a_dtype_that_all_of_its_readers_have(multiplied, itemsize, fake_mesh) -> None:
    """By hand: gathered and passing, this block's and the next one's, with the gradient that is not scattered yet."""
    mesh = fake_mesh(dp_shard=4)
    graph = captured(Tied(multiplied), torch.zeros(8, 4, dtype=torch.long), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    (axis,) = plan_axes("auto", mesh)
    costs = costs_of(mesh)
    (table,) = free_parameters(graph, placeholders, axis, [axis], mesh, costs).values()
    rows = next(way for way in table.ways if way.stored == {"dp_shard": 0})
    assert rows.gathered_us == pytest.approx(costs.launch_time_us("all_gather", 64 * 16 * itemsize, axis.group_name))
    assert rows.passing_bytes == 2 * 64 * 16 * itemsize + 64 * 16 * 4 * 3 / 4
