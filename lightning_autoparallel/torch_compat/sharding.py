"""DTensor's operator rules as tables of placements over one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)
from torch.utils._pytree import tree_map

StridedShard = _StridedShard
__all__ = ["StridedShard", "has_rule", "is_plain", "rule_rows", "split_factor_of"]

Row = tuple[tuple[Placement | None, ...], tuple[Placement | None, ...]]  # (outputs, inputs)


def has_rule(op: object) -> bool:
    """Whether DTensor registers a strategy for ``op`` itself."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return op in propagator.op_single_dim_strategy_funcs or op in propagator.op_strategy_funcs


def rule_rows(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: int, mesh: DeviceMesh) -> list[Row]:
    """Every placement DTensor's rule of ``op`` allows on the one-dimensional ``mesh``.

    ``args`` hold fake tensors where the call has tensors; ``outputs`` is the number of results. A rule may raise
    whatever it likes: the caller treats that as a missing rule.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    single = propagator.op_single_dim_strategy_funcs.get(op)
    if single is not None:
        to_meta = lambda leaf: _meta(leaf) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        rows = single.func(op, tree_map(to_meta, tuple(args)), tree_map(to_meta, kwargs))
        return [(tuple(map(_plain, row[:outputs])), tuple(map(_plain, row[outputs:]))) for row in rows]
    to_strategy = lambda leaf: _all_placements(leaf, mesh) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    schema = OpSchema(op, tree_map(to_strategy, tuple(args)), tree_map(to_strategy, kwargs))
    strategy = propagator.op_strategy_funcs[op](schema)
    if not isinstance(strategy, OpStrategy):
        raise NotImplementedError(f"{op} returns a tuple strategy")
    return [_row_of(spec, outputs) for spec in strategy.strategies]


def _row_of(spec: OpSpec, outputs: int) -> Row:
    specs = spec.output_specs
    out = (specs,) * outputs if isinstance(specs, DTensorSpec) or specs is None else tuple(specs)
    # A rule without input specs wants its inputs as its output.
    inputs = tuple(spec.input_specs) if spec.input_specs is not None else (spec.output_spec,)
    return tuple(_placement(item) for item in out), tuple(_placement(item) for item in inputs)


def _placement(spec: DTensorSpec | None) -> Placement | None:
    return None if spec is None else spec.placements[0]


def _plain(placement: Placement | _ShardingPlaceholder | None) -> Placement | None:
    return Shard(placement.dim) if isinstance(placement, _ShardingPlaceholder) else placement


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _all_placements(tensor: Tensor, mesh: DeviceMesh) -> OpStrategy:
    shards = [Shard(dim) for dim, size in enumerate(tensor.shape) if size and size % mesh.size() == 0]
    candidates: list[Placement] = [Replicate(), *shards, Partial("sum")]
    meta = _meta(tensor)
    return OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), tensor_meta=meta)) for placement in candidates])


def is_plain(placement: Placement) -> bool:
    """Whether ``placement`` is R, S(dim), a strided S(dim) or P(sum), and no special subclass of them."""
    if isinstance(placement, Partial):
        return type(placement) is Partial and placement.reduce_op == "sum"
    return type(placement) in (Replicate, Shard, _StridedShard)


def split_factor_of(placement: Placement) -> int:
    """How many interleaved blocks of the dim each rank holds a part of: 1 for a plain shard."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
