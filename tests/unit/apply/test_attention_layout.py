"""The forward's result as the backward of efficient attention takes it: (B, H, T, D), in memory (B, T, H, D)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.contracts import NodePlacement, ShardingPlan
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.hand_made import as_captured
from tests.support.placements import R, S
from tests.support.simulate import axis_of

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def lowered(before: Placement, behind: Placement) -> fx.Node:
    """The backward of (4, 4, 8, 16) attention that is placed so, the forward ``before`` and itself ``behind``."""
    graph, mode, placements = fx.Graph(), FakeTensorMode(), {}

    def call(target: Any, *args: Any, outputs: tuple[Placement, ...], inputs: tuple[Placement, ...] = ()) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
        each = tuple((placement,) for placement in outputs), tuple((placement,) for placement in inputs)
        placements[node.name] = NodePlacement(outputs=each[0], inputs=each[1])
        return node

    query = graph.placeholder("query")
    with mode:
        query.meta["val"] = torch.empty(4, 8, 4, 16).transpose(1, 2)
    placements["query"] = NodePlacement(inputs=(), outputs=((before,),))
    made = call(
        FORWARD, query, query, query, None, True, outputs=(before, before, R, R), inputs=(before, before, before)
    )
    placed = (before, before, R, R)
    out, sums, seed, offset = (
        call(operator.getitem, made, i, outputs=(placement,)) for i, placement in enumerate(placed)
    )
    saved = (None, out, sums, seed, offset, 0.0, [True, True, True, False])
    grads = call(BACKWARD, query, query, query, query, *saved, outputs=(behind,) * 3, inputs=(*(behind,) * 6, R, R))
    grad = call(operator.getitem, grads, 0, outputs=(behind,))
    graph.output([grad])
    plan = ShardingPlan(name="by hand", axes=(axis_of(2),), nodes=placements, parameters={}, outputs=((behind,),))
    sharded = lower_graph(as_captured(graph), plan).graph_module.graph
    (found,) = sharded.find_nodes(op="call_function", target=BACKWARD)
    return found


@pytest.mark.parametrize(("before", "behind"), [(R, S(1)), (R, S(0)), (S(1), R), (S(0), R), (S(0), S(1)), (S(1), S(0))])
def test_what_other_shards_gave_is_laid_out_as_the_kernel_makes_it(before: Placement, behind: Placement):
    out = lowered(before, behind).args[5]
    assert out.meta["val"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("placement", [R, S(0), S(1)])
def test_what_the_kernel_made_is_not_copied(placement: Placement):
    out = lowered(placement, placement).args[5]
    assert out.target is operator.getitem and out.args[0].target is FORWARD
