"""Attention that drops something is computed by ranks together only where they draw one mask; graphs by hand."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.apply.attention_masks import check_masks
from lightning_autoparallel.contracts import NodePlacement, PlanAxis
from lightning_autoparallel.errors import UnsupportedOpError
from tests.support.placements import R, S

aten = torch.ops.aten
AXES = tuple(PlanAxis(mesh_axes=(name,), size=2, rank=0, group_name=name) for name in ("dp_shard", "tp"))


def attention(dropout: float) -> tuple[fx.Node, fx.Node]:
    """Forward and backward."""
    graph = fx.Graph()
    query, gradient = graph.placeholder("query"), graph.placeholder("gradient")
    args = (query, query, query, None, True, dropout, False)
    forward = graph.call_function(aten._scaled_dot_product_cudnn_attention.default, args)
    out, lse, seed, offset = (graph.call_function(operator.getitem, (forward, place)) for place in (0, 1, 6, 7))
    saved = (gradient, query, query, query, out, lse, seed, offset, None, None, None, 8, 8, dropout, False)
    return forward, graph.call_function(aten._scaled_dot_product_cudnn_attention_backward.default, saved)


def plan_of(placed: dict[fx.Node, Any]) -> Any:
    nodes = {node.name: NodePlacement(inputs=(), outputs=(placements,)) for node, placements in placed.items()}
    return SimpleNamespace(axes=AXES, nodes=nodes)


@pytest.mark.parametrize(
    ("dropout", "placed", "is_local", "error"),
    [
        (0.1, (S(0), R), False, None),
        (0.1, (S(1), R), False, None),
        (0.1, (R, R), False, "drop otherwise on each rank of dp_shard: apply dropout outside"),
        (0.1, (R, R), True, None),
        (0.0, (R, R), False, None),
    ],
)
def test_what_ranks_of_other_rows_all_compute_would_differ(dropout, placed, is_local, error) -> None:
    forward, _ = attention(dropout)
    check = lambda: check_masks(forward, plan_of({forward: placed}), is_local)  # noqa: E731
    if error is None:
        check()
    else:
        with pytest.raises(UnsupportedOpError, match=error):
            check()


@pytest.mark.parametrize(
    ("dropout", "lies", "is_refused"), [(0.1, (R, R), True), (0.1, (S(0), R), False), (0, (R, R), False)]
)
def test_a_backward_lies_as_its_forward_drew(dropout, lies, is_refused) -> None:
    forward, backward = attention(dropout)
    plan = plan_of({forward: (S(0), R), backward: lies})
    if is_refused:
        with pytest.raises(UnsupportedOpError, match="the backward of attention with dropout lies otherwise"):
            check_masks(backward, plan, is_local=False)
    else:
        check_masks(backward, plan, is_local=False)


@pytest.mark.parametrize(
    ("placed", "is_local", "is_refused"), [((R, R), False, True), ((S(0), R), False, False), ((R, R), True, False)]
)
def test_noise_beside_another_result(placed, is_local, is_refused) -> None:
    """RReLU gives its slopes beside its result: neither is sent to ranks that drew others."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    call = graph.call_function(aten.rrelu_with_noise_functional.default, (rows, rows, 0.1, 0.3, True))
    call.meta["val"] = (torch.zeros(4), torch.zeros(4))
    plan = SimpleNamespace(axes=AXES, nodes={call.name: NodePlacement(inputs=(), outputs=(placed, placed))})
    if is_refused:
        with pytest.raises(UnsupportedOpError, match="other numbers on each rank of dp_shard"):
            check_masks(call, plan, is_local)
    else:
        check_masks(call, plan, is_local)
