"""Where a plan has the operands and results of every call, those of equal blocks as one."""

from __future__ import annotations

from collections import Counter

from lightning_autoparallel.contracts import CapturedGraph, NodePlacement, PlacedCalls, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import call_text


def placed_calls(captured: CapturedGraph, plan: ShardingPlan) -> tuple[PlacedCalls, ...]:
    """Every kind of call of the joint graph in each way that it is placed, in the order of their first calls."""
    counted: Counter[tuple[str, str, bool, tuple[str, ...]]] = Counter()
    for node in captured.graph_module.graph.nodes:
        if node.op == "call_function" and not fxn.is_getitem(node):
            module = fxn.kind_of(fxn.module_path(node) or "")
            counted[module, fxn.call_of(node), fxn.is_backward(node), _texts(plan.nodes[node.name], plan)] += 1
    names = [axis.name for axis in plan.axes]
    return tuple(
        PlacedCalls(
            module=module, call=call, backward=backward, count=count, placements=dict(zip(names, texts, strict=True))
        )
        for (module, call, backward, texts), count in counted.items()
    )


def _texts(placed: NodePlacement, plan: ShardingPlan) -> tuple[str, ...]:
    """For each axis of the plan."""
    return tuple(
        call_text([each[i] for each in placed.inputs], [each if each is None else each[i] for each in placed.outputs])
        for i in range(len(plan.axes))
    )
