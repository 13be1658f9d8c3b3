"""Rules of operators that look up, score or scatter along a vocabulary, which may be sharded.

A row in which the indexed or normalised dim is sharded means more than running the operator on local parts:
``apply/vocabulary.py`` writes out what each rank computes then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.fx.placements import dim_of, is_shard
from lightning_autoparallel.plan.rules import OpCall, P, R, Row, S, along, rule, with_strides

aten = torch.ops.aten
_REDUCED = {aten._log_softmax.default: 2, aten._log_softmax_backward_data.default: 1}  # the maximum and sums, a sum


@rule(aten._log_softmax.default, aten._log_softmax_backward_data.default, strided_already=True)
def log_softmax_rule(call: OpCall) -> list[Row]:
    """Any dim; along the normalised one, the maximum and the sums are reduced inside."""
    rank = call.inputs[0].dim()
    normalised = call.args[_position(call.op)] % max(rank, 1)
    free = along(call, [dim for dim in range(rank) if dim != normalised])
    return [*with_strides(free, call.split_factors), *along(call, [normalised] if rank else [])]


def reduced_inside(op: Any, args: Sequence[Any], value: Tensor, placement: Placement | None) -> tuple[int, int]:
    """How many all-reduces an operator is written out with, whose first tensor ``value`` lies so, and bytes of each.

    The bytes are those of one number, as wide as sums are, for each row of the global tensor.
    """
    launches = _REDUCED.get(op, 0)
    if not launches or placement is None or not is_shard(placement):
        return 0, 0
    normalised = args[_position(op)] % value.dim()
    if dim_of(placement) != normalised:
        return 0, 0
    is_widened = op is aten._log_softmax.default and args[2]
    itemsize = torch.float32.itemsize if is_widened else value.element_size()
    return launches, value.numel() // value.shape[normalised] * itemsize


def _position(op: Any) -> int:
    """Of the argument that names the normalised dim."""
    return 1 if op is aten._log_softmax.default else 2


@rule(aten.embedding.default, strided_already=True)
def embedding_rule(call: OpCall) -> list[Row]:
    """By tokens, by the embedding dim, or by rows of the table: a rank that has not the row adds zeros."""
    table, tokens = call.inputs
    rows: list[Row] = [((S(dim),), (R, S(dim))) for dim in range(tokens.dim())]
    rows.append(((S(tokens.dim()),), (S(table.dim() - 1), R)))
    return [*with_strides(rows, call.split_factors), ((P,), (S(0), R))]


@rule(aten.embedding_dense_backward.default, strided_already=True)
def embedding_dense_backward_rule(call: OpCall) -> list[Row]:
    """Rows of any shard of the indices add up, unless scaled by counts of all; the table's dims may be sharded."""
    grad, indices = call.inputs
    scaled_by_frequency = len(call.args) > 4 and call.args[4]
    dims = range(0) if scaled_by_frequency else range(indices.dim())
    rows: list[Row] = [((P,), (S(dim), S(dim))) for dim in dims]
    rows.append(((S(1),), (S(grad.dim() - 1), R)))
    return [*with_strides(rows, call.split_factors), ((P,), (P, R)), ((S(0),), (R, R))]


@rule(aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default, strided_already=True)
def indexed_dim_rule(call: OpCall) -> list[Row]:
    """Sharded on any dim but the indexed one where all tensors have the same size, or on that with one index a row."""
    first, index = call.inputs[0], call.inputs[1]
    dim = call.args[1] % max(first.dim(), 1)
    shared = [
        d
        for d in range(first.dim())
        if d != dim and all(x.dim() == first.dim() and x.shape[d] == first.shape[d] for x in call.inputs)
    ]
    rows = with_strides(along(call, shared), call.split_factors)
    is_gather = call.op is aten.gather.default
    if is_gather:
        rows.append(((P,), (P, R)))
    if call.op in (aten.gather.default, aten.scatter.value) and index.dim() and index.shape[dim] == 1:
        rows.append(((P if is_gather else S(dim),), (S(dim), R)))
    return rows
