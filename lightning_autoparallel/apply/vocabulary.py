"""Operators along a sharded vocabulary, written out: look-ups of own rows, reductions of maxima and sums.

The full logits never exist on one rank: of the (tokens, vocabulary) tensors each rank has its columns only.
Log-softmax over shards reduces the maximum, then the sum of exponentials (Shoeybi et al. 2019, "Megatron-LM", sec. 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Shard

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.contracts import NodePlacement, Placements, PlanAxis, ShardingPlan
from lightning_autoparallel.fx.placements import dim_of, is_shard
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten

Arguments = tuple[Any, ...]  # of the local call


def expand_along_vocabulary(
    emitter: GraphEmitter, node: fx.Node, args: Arguments, placement: NodePlacement, plan: ShardingPlan
) -> fx.Node | None:
    """The local computation of ``node`` where its vocabulary dim is sharded; None where the operator itself will do."""
    found = _EXPANSIONS.get(node.target)  # type: ignore[call-overload]
    if found is None:
        return None
    vocabulary_of, expand = found
    sharded, dim = vocabulary_of(node, placement)
    axis = _axis_of(sharded, dim, plan)
    return None if axis is None else expand(emitter, args, axis)


def _axis_of(placements: Placements, dim: int, plan: ShardingPlan) -> PlanAxis | None:
    """The axis that cuts the dim; of several, which are then the batch axes and were solved as one, the joint one."""
    cutting = [
        (placement, axis)
        for placement, axis in zip(placements, plan.axes, strict=True)
        if is_shard(placement) and dim_of(placement) == dim
    ]
    if len(cutting) < 2:
        return cutting[0][1] if cutting else None
    names = tuple(name for _, axis in cutting for name in axis.mesh_axes)
    joint = next((axis for axis in plan.joint_axes if axis.mesh_axes == names), None)
    assert joint is not None and all(isinstance(placement, Shard) for placement, _ in cutting), (
        f"no one group cuts the vocabulary as {placements} do"
    )
    return joint


def _reduced(emitter: GraphEmitter, node: fx.Node, reduce_op: str, axis: PlanAxis) -> fx.Node:
    reduced = emitter.call(collectives.ALL_REDUCE, emitter.contiguous(node), reduce_op, axis.group_name)
    return emitter.call(collectives.WAIT, reduced)


def _log_softmax(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    logits, dim, half_to_float = args
    if half_to_float:
        logits = emitter.call(aten._to_copy.default, logits, dtype=torch.float32)
    maximum = _reduced(emitter, emitter.call(aten.amax.default, logits, [dim], True), "max", axis)
    shifted = emitter.call(aten.sub.Tensor, logits, maximum)
    total = emitter.call(aten.sum.dim_IntList, emitter.call(aten.exp.default, shifted), [dim], True)
    return emitter.call(aten.sub.Tensor, shifted, emitter.call(aten.log.default, _reduced(emitter, total, "sum", axis)))


def _log_softmax_backward(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    grad, output, dim, dtype = args
    total = _reduced(emitter, emitter.call(aten.sum.dim_IntList, grad, [dim], True), "sum", axis)
    share = emitter.call(aten.mul.Tensor, emitter.call(aten.exp.default, output), total)
    result = emitter.call(aten.sub.Tensor, grad, share)
    if result.meta["val"].dtype == dtype:
        return result
    return emitter.call(aten._to_copy.default, result, dtype=dtype)


def _own_rows(emitter: GraphEmitter, index: fx.Node, size: int, axis: PlanAxis) -> tuple[fx.Node, fx.Node]:
    """Which indices are of this rank's part of ``size``, and those as positions in it (0 for the others)."""
    local = emitter.call_of_rank(axis, aten.sub.Tensor, index, axis.rank * size)
    own = emitter.call(
        aten.bitwise_and.Tensor, emitter.call(aten.ge.Scalar, local, 0), emitter.call(aten.lt.Scalar, local, size)
    )
    return own, emitter.call(aten.mul.Tensor, local, own)


def _embedding(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    table, tokens = args[0], args[1]
    own, rows = _own_rows(emitter, tokens, table.meta["val"].shape[0], axis)
    found = emitter.call(aten.embedding.default, table, rows)
    return _where_own(emitter, emitter.call(aten.unsqueeze.default, own, -1), found)


def _where_own(emitter: GraphEmitter, own: fx.Node, value: fx.Node) -> fx.Node:
    # Not a product with the mask: what the other ranks' rows hold may be infinite.
    zero = emitter.call(aten.scalar_tensor.default, 0, dtype=value.meta["val"].dtype, device=value.meta["val"].device)
    return emitter.call(aten.where.self, own, value, zero)


def _embedding_backward(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    grad, tokens, rows, padding, *rest = args
    size = rows // axis.size
    own, local = _own_rows(emitter, tokens, size, axis)
    if padding >= 0:
        own = emitter.call(aten.bitwise_and.Tensor, own, emitter.call(aten.ne.Scalar, tokens, padding))
    # Rows of other ranks are added up in a row of their own, which is cut off.
    spare = emitter.call(aten.scalar_tensor.default, size, dtype=torch.int64, device=tokens.meta["val"].device)
    where = emitter.call(aten.where.self, own, local, spare)
    summed = emitter.call(aten.embedding_dense_backward.default, grad, where, size + 1, -1, *rest)
    return emitter.call(aten.slice.Tensor, summed, 0, 0, size)


def _gather(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    values, dim, index = args[:3]
    own, local = _own_rows(emitter, index, values.meta["val"].shape[dim], axis)
    return _where_own(emitter, own, emitter.call(aten.gather.default, values, dim, local))


def _scatter_value(emitter: GraphEmitter, args: Arguments, axis: PlanAxis) -> fx.Node:
    base, dim, index, value = args
    own, local = _own_rows(emitter, index, base.meta["val"].shape[dim], axis)
    kept = emitter.call(aten.gather.default, base, dim, local)
    constant = emitter.call(aten.full_like.default, kept, value)
    return emitter.call(aten.scatter.src, base, dim, local, emitter.call(aten.where.self, own, constant, kept))


Vocabulary = Callable[[fx.Node, NodePlacement], tuple[Placements, int]]
Expansion = Callable[[GraphEmitter, Arguments, PlanAxis], fx.Node]


def _dim_argument(position: int) -> Vocabulary:
    def find(node: fx.Node, placement: NodePlacement) -> tuple[Placements, int]:
        first: Any = node.args[0]
        dim: Any = node.args[position]
        return placement.inputs[0], dim % first.meta["val"].dim()

    return find


def _table_rows(node: fx.Node, placement: NodePlacement) -> tuple[Placements, int]:
    return placement.inputs[0], 0


def _result_rows(node: fx.Node, placement: NodePlacement) -> tuple[Placements, int]:
    result = placement.outputs[0]
    assert result is not None
    return result, 0


_EXPANSIONS: dict[Any, tuple[Vocabulary, Expansion]] = {
    aten._log_softmax.default: (_dim_argument(1), _log_softmax),
    aten._log_softmax_backward_data.default: (_dim_argument(2), _log_softmax_backward),
    aten.gather.default: (_dim_argument(1), _gather),
    aten.scatter.value: (_dim_argument(1), _scatter_value),
    aten.embedding.default: (_table_rows, _embedding),
    aten.embedding_dense_backward.default: (_result_rows, _embedding_backward),
}
