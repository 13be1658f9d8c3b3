"""Our operator rules: what placements over one mesh axis an operator may compute with.

A rule returns rows ``(outputs, inputs)`` of single placements. Rows whose shards are not even are dropped later, and
the all-replicated row is added by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from lightning_autoparallel.fx.placements import shard
from lightning_autoparallel.torch_compat.sharding import StridedShard

aten = torch.ops.aten

R: Placement = Replicate()
P: Placement = Partial("sum")
S: Callable[[int], Placement] = Shard


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """One call of an operator on global fake tensors; ``split_factors`` are those of strided shards that may arrive."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    split_factors: tuple[int, ...] = (1,)


Row = tuple[tuple[Placement | None, ...], tuple[Placement | None, ...]]
Rule = Callable[[OpCall], list[Row] | None]  # None: torch's own rule is right for such a call
RULES: dict[Any, Rule] = {}
STRIDED_ALREADY: set[Any] = set()


def rule(*ops: Any, strided_already: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators; each may have one only.

    Rows for strided shards are added by the caller, unless the rule gives those that hold itself.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"{op} has a rule already"
            RULES[op] = function
            if strided_already:
                STRIDED_ALREADY.add(op)
        return function

    return register


def same(placement: Placement, call: OpCall) -> Row:
    """The row in which every tensor has ``placement``."""
    return tuple(placement if item is not None else None for item in call.outputs), (placement,) * len(call.inputs)


def along(call: OpCall, dims: Iterable[int]) -> list[Row]:
    """Rows in which every tensor is sharded on the same dim."""
    return [same(S(dim), call) for dim in dims]


def with_strides(rows: Sequence[Row], split_factors: Sequence[int]) -> list[Row]:
    """What holds for shards of a dim holds for strided shards of it, if all of the row are strided alike."""
    result = list(rows)
    for factor in split_factors:
        if factor > 1:
            result += [_strided(row, factor) for row in rows if not _has_strides(row)]
    return result


def _has_strides(row: Row) -> bool:
    return any(isinstance(placement, StridedShard) for side in row for placement in side)


def _strided(row: Row, factor: int) -> Row:
    def convert(placement: Placement | None) -> Placement | None:
        return shard(placement.dim, factor) if isinstance(placement, Shard) else placement

    outputs, inputs = row
    return tuple(map(convert, outputs)), tuple(map(convert, inputs))


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_rule(call: OpCall) -> list[Row]:
    """A reduced dim gives a partial sum, a kept dim stays sharded; sums are linear."""
    (x,) = call.inputs
    dims = call.args[1] if len(call.args) > 1 and call.args[1] else range(x.dim())
    reduced = {dim % x.dim() for dim in dims} if x.dim() else set()
    keepdim = len(call.args) > 2 and call.args[2]
    rows: list[Row] = [((P,), (P,))]
    for dim in range(x.dim()):
        kept = dim if keepdim else dim - sum(other < dim for other in reduced)
        rows.append(((P if dim in reduced else S(kept),), (S(dim),)))
    return rows


@rule(aten.full.default)
def full_rule(call: OpCall) -> list[Row]:
    """A constant has any shard for nothing, and zeros are a partial sum too."""
    (out,) = call.outputs
    assert out is not None
    rows: list[Row] = [((S(dim),), ()) for dim in range(out.dim())]
    return [*rows, ((P,), ())] if call.args[1] == 0 else rows


@rule(aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low)
def random_factory_rule(call: OpCall) -> list[Row]:
    """Each shard draws its own part."""
    (out,) = call.outputs
    assert out is not None
    return [((S(dim),), ()) for dim in range(out.dim())]


@rule(
    aten.arange.start_step, aten.arange.default, aten.arange.start, aten.scalar_tensor.default, aten.empty.memory_format
)
def small_factory_rule(call: OpCall) -> list[Row]:
    """Every rank makes the whole; slicing it is free."""
    return []


@rule(aten.convolution.default)
def convolution_rule(call: OpCall) -> list[Row]:
    """Sharded by batch; the weight is whole."""
    return [((S(0),), (S(0), *(R for _ in call.inputs[1:])))]


@rule(aten.convolution_backward.default)
def convolution_backward_rule(call: OpCall) -> list[Row]:
    """By batch: the input's gradient is sharded, those of weight and bias are partial sums."""
    outputs = tuple(None if out is None else (S(0), P, P)[i] for i, out in enumerate(call.outputs))
    return [(outputs, (S(0), S(0), R))]


@rule(aten._native_batch_norm_legit_no_training.default)
def evaluated_batch_norm_rule(call: OpCall) -> list[Row]:
    """Statistics are given: independent along every dim, and the channels' numbers are cut as channels are."""
    x, *numbers = call.inputs
    nothing = (R,) * (len(call.outputs) - 1)
    return [((S(d), *nothing), (S(d), *(S(0) if d == 1 else R for _ in numbers))) for d in range(x.dim())]


_SPATIAL_DIMS = {
    aten.reflection_pad1d.default: 1,
    aten.max_pool3d_with_indices.default: 3,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.avg_pool3d.default: 3,
    aten.avg_pool3d_backward.default: 3,
}


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad1d.default,
)
def spatial_rule(call: OpCall) -> list[Row]:
    """(N, C, ...) or (C, ...) tensors: leading dims are independent."""
    leading = call.inputs[0].dim() - _SPATIAL_DIMS.get(call.op, 2)
    return along(call, range(leading))


@rule(
    aten.sort.default,
    aten.topk.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
)
def one_dim_rule(call: OpCall) -> list[Row]:
    """Independent along every dim but one; that one is the last unless given."""
    (x,) = call.inputs
    position = 2 if call.op is aten.topk.default else 1
    dim = call.args[position] if len(call.args) > position else -1
    if dim is None or not x.dim():
        return []
    dim %= x.dim()
    out = next(item for item in call.outputs if item is not None)
    drops = out.dim() < x.dim()
    return [(tuple(S(d - (drops and d > dim)) for _ in call.outputs), (S(d),)) for d in range(x.dim()) if d != dim]
