"""Round trips through a rule's alias: who reads what instead, which aliases go, and that all ranks compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.apply.aliases import eliminate_alias_round_trips
from lightning_autoparallel.contracts import CapturedGraph, NodePlacement, PlanAxis, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.hand_made import as_captured
from tests.support.lockstep import one_group, run_lockstep
from tests.support.placements import cut, joined

aten = torch.ops.aten
R, S0, S1, P = (Replicate(),), (Shard(0),), (Shard(1),), (Partial("sum"),)
SIZE = 2


class Step:
    """A step of one input x (4, 4), cut along dim 0 over two ranks, and the placements each call reads and makes."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.mode.from_tensor(torch.empty(4, 4))
        self.nodes = {"x": NodePlacement(inputs=(), outputs=(S0,))}

    def __call__(self, target: Any, *args: Any, reads: Any = (), makes: Any = S0) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
        self.nodes[node.name] = NodePlacement(inputs=reads, outputs=(makes,))
        return node

    def alias(self, value: fx.Node, placed: Any) -> fx.Node:
        return self(aten.alias.default, value, reads=(placed,), makes=placed)

    def end(self, results: Sequence[fx.Node], placed: Sequence[Any]) -> tuple[CapturedGraph, ShardingPlan]:
        self.graph.output(list(results))
        axis = PlanAxis(mesh_axes=("dp_shard",), size=SIZE, rank=0, group_name="0")
        plan = ShardingPlan(name="plan", axes=(axis,), nodes=self.nodes, parameters={}, outputs=tuple(placed))
        return as_captured(self.graph, len(results)), plan


def read_by(captured: CapturedGraph, name: str) -> list[str]:
    (node,) = [node for node in captured.graph_module.graph.nodes if node.name == name]
    return [argument.name for argument in fxn.tensor_arguments(node)]


def check_values(captured: CapturedGraph, plan: ShardingPlan) -> list[str]:
    """Run what lowering makes of it on two ranks against the step on one device; the collectives that it takes."""
    x = torch.randn(4, 4)
    expected = fx.Interpreter(captured.graph_module).run(x)
    lowered = []
    for rank in range(SIZE):
        (axis,) = plan.axes
        mine = PlanAxis(mesh_axes=axis.mesh_axes, size=SIZE, rank=rank, group_name=axis.group_name)
        lowered.append(lower_graph(captured, ShardingPlan(**{**vars(plan), "axes": (mine,)})).graph_module.graph)
    results = run_lockstep(lowered, [[part] for part in cut(x, Shard(0), SIZE)], one_group("0", SIZE))
    for i, (whole, (placement,)) in enumerate(zip(expected, plan.outputs, strict=True)):
        torch.testing.assert_close(joined([result[i] for result in results], placement, whole.shape), whole)
    return [fxn.collective_kind(node) for node in fxn.collectives_of(lowered[0])]


def test_a_reader_of_the_placement_before_reads_the_value_before():
    step = Step()
    value = step(aten.exp.default, step.x, reads=(S0,))
    alias = step.alias(value, R)
    back = step(aten.neg.default, alias, reads=(S0,))
    kept = step(aten.sin.default, alias, reads=(R,), makes=R)
    captured, plan = step.end([back, kept], [S0, R])
    changed, smaller, moved = eliminate_alias_round_trips(captured, plan)
    assert moved == 1
    assert read_by(changed, back.name) == [value.name]
    assert read_by(changed, kept.name) == [alias.name]
    assert smaller.nodes == plan.nodes, "somebody still reads the alias"
    assert read_by(captured, back.name) == [alias.name], "the captured graph stays as it was"
    assert check_values(captured, plan) == ["all_gather"]


def test_an_alias_that_nobody_reads_any_more_leaves_graph_and_plan():
    step = Step()
    value = step(aten.exp.default, step.x, reads=(S0,))
    outer = step.alias(value, R)
    inner = step.alias(outer, S1)
    back = step(aten.neg.default, inner, reads=(S0,))
    captured, plan = step.end([back], [S0])
    changed, smaller, moved = eliminate_alias_round_trips(captured, plan)
    assert moved == 1
    assert read_by(changed, back.name) == [value.name], "past both aliases"
    assert plan.nodes.keys() - smaller.nodes.keys() == {outer.name, inner.name}
    assert smaller.nodes.keys() == {node.name for node in changed.graph_module.graph.nodes if node.op != "output"}
    assert check_values(captured, plan) == []


def test_a_result_may_be_what_goes_back():
    step = Step()
    value = step(aten.exp.default, step.x, reads=(S0,))
    captured, plan = step.end([step.alias(value, R)], [S0])
    changed, _, moved = eliminate_alias_round_trips(captured, plan)
    assert moved == 1
    assert read_by(changed, "output") == [value.name]
    assert check_values(captured, plan) == []


def test_nothing_changes_where_nothing_goes_back():
    step = Step()
    alias = step.alias(step(aten.exp.default, step.x, reads=(S0,)), R)
    unmoved = step.alias(alias, R)
    end = step(aten.neg.default, unmoved, reads=(R,), makes=R)
    captured, plan = step.end([end], [R])
    assert eliminate_alias_round_trips(captured, plan) == (captured, plan, 0)
    assert check_values(captured, plan) == ["all_gather"]


def test_a_third_placement_is_made_from_the_alias():
    """The value lies as a sum to be made, its alias cut along dim 0: what is wanted whole comes from the alias."""
    step = Step()
    value = step(aten.sum.dim_IntList, step.x, [0], True, reads=(S0,), makes=P)
    alias = step.alias(value, S1)
    third = step(aten.neg.default, alias, reads=(R,), makes=R)
    back = step(aten.mul.Tensor, alias, 2.0, reads=(P,), makes=P)
    captured, plan = step.end([third, back], [R, R])
    changed, _, moved = eliminate_alias_round_trips(captured, plan)
    assert moved == 1
    assert read_by(changed, third.name) == [alias.name]
    assert read_by(changed, back.name) == [value.name]
    check_values(captured, plan)


def test_one_argument_in_two_places_is_read_in_two_placements():
    step = Step()
    value = step(aten.exp.default, step.x, reads=(S0,))
    alias = step.alias(value, R)
    twice = step(aten.add.Tensor, alias, alias, reads=(S0, S0))
    mixed = step(aten.matmul.default, alias, alias, reads=(S0, R))
    captured, plan = step.end([twice, mixed], [S0, S0])
    changed, _, moved = eliminate_alias_round_trips(captured, plan)
    assert moved == 3
    assert read_by(changed, twice.name) == [value.name, value.name]
    assert read_by(changed, mixed.name) == [value.name, alias.name]
    assert check_values(captured, plan) == ["all_gather"]
