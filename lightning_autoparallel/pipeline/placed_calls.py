"""Where a plan has the operands and results of every call, those of equal blocks as one."""

from __future__ import annotations

from collections import Counter

from lightning_autoparallel.contracts import CapturedGraph, NodePlacement, PlacedCalls, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placed_text


def placed_calls(captured: CapturedGraph, plan: ShardingPlan) -> tuple[PlacedCalls, ...]:
    """Every kind of call of what was captured in each way that it is placed, in the order of their first calls."""
    # A local graph is that of one rank's rows: on the axes that share those out nothing is placed.
    axes = {axis.name: i for i, axis in enumerate(plan.axes) if not (captured.local and axis.shards_batch)}
    counted: Counter[tuple[str, str, bool, tuple[str, ...]]] = Counter()
    for node in captured.graph_module.graph.nodes:
        if node.op == "call_function" and not fxn.is_getitem(node):
            module, placed = fxn.kind_of(fxn.module_path(node) or ""), plan.nodes[node.name]
            texts = tuple(_text(placed, i) for i in axes.values())
            counted[module, fxn.call_of(node), fxn.is_backward(node), texts] += 1
    return tuple(
        PlacedCalls(
            module=module, call=call, backward=backward, count=count, placements=dict(zip(axes, texts, strict=True))
        )
        for (module, call, backward, texts), count in counted.items()
    )


def _text(placed: NodePlacement, axis: int) -> str:
    return placed_text(
        [each[axis] for each in placed.inputs], [None if each is None else each[axis] for each in placed.outputs]
    )
