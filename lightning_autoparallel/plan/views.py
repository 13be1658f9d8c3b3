"""Rules of operators that only move elements: placements follow the dims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from lightning_autoparallel.fx.placements import shard
from lightning_autoparallel.plan.rules import OpCall, P, R, Row, S, rule, same

aten = torch.ops.aten


def _mapped(call: OpCall, dims: Mapping[int, int]) -> list[Row]:
    """Rows of a linear, one-input operator whose input dim i becomes output dim ``dims[i]``."""
    rows: list[Row] = [same(P, call)]
    for source, target in dims.items():
        rows += [
            (
                tuple(shard(target, factor) if out is not None else None for out in call.outputs),
                (shard(source, factor),),
            )
            for factor in call.split_factors
        ]
    return rows


@rule(aten.permute.default)
def permute_rule(call: OpCall) -> list[Row]:
    """Dims move, nothing else."""
    order = [dim % call.inputs[0].dim() for dim in call.args[1]]
    return _mapped(call, {source: target for target, source in enumerate(order)})


@rule(aten.transpose.int, aten.t.default)
def transpose_rule(call: OpCall) -> list[Row]:
    """Two dims change places."""
    rank = call.inputs[0].dim()
    first, second = (0, min(1, rank - 1)) if call.op is aten.t.default else (call.args[1] % rank, call.args[2] % rank)
    swap = {first: second, second: first}
    return _mapped(call, {dim: swap.get(dim, dim) for dim in range(rank)})


@rule(aten.unsqueeze.default)
def unsqueeze_rule(call: OpCall) -> list[Row]:
    """Dims from the new one on move by one."""
    rank = call.inputs[0].dim()
    new = call.args[1] % (rank + 1)
    return _mapped(call, {dim: dim + (dim >= new) for dim in range(rank)})


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze_rule(call: OpCall) -> list[Row]:
    """Dims of size 1 go. Any other dim it names must be whole: a shard of one row would go too."""
    (x,) = call.inputs
    named = range(x.dim()) if len(call.args) == 1 else call.args[1]
    wanted = {dim % max(x.dim(), 1) for dim in (named if isinstance(named, Sequence) else [named])}
    left = [dim for dim in range(x.dim()) if dim not in wanted or x.shape[dim] != 1]
    return _mapped(call, {dim: position for position, dim in enumerate(left) if dim not in wanted})


@rule(aten.expand.default)
def expand_rule(call: OpCall) -> list[Row]:
    """Kept dims stay; a new or widened dim may be made as a shard from the whole input."""
    (x,), (out,) = call.inputs, call.outputs
    assert out is not None
    lead = out.dim() - x.dim()
    kept = {dim: dim + lead for dim in range(x.dim()) if x.shape[dim] == out.shape[dim + lead]}
    made: list[Row] = [((S(dim),), (R,)) for dim in range(out.dim()) if dim not in kept.values()]
    return _mapped(call, kept) + made


@rule(aten.select.int, aten.unbind.int)
def select_rule(call: OpCall) -> list[Row]:
    """The selected dim must be whole."""
    rank = call.inputs[0].dim()
    gone = (call.args[1] if len(call.args) > 1 else 0) % rank
    return _mapped(call, {dim: dim - (dim > gone) for dim in range(rank) if dim != gone})


@rule(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.flip.default, aten.roll.default)
def partial_dim_rule(call: OpCall) -> list[Row]:
    """A dim that is cut or reordered must be whole; a slice that takes everything cuts nothing."""
    (x,), out = call.inputs, call.outputs[0]
    assert out is not None
    cut = {dim % x.dim() for dim in _cut_dims(call)}
    if call.op is aten.roll.default and len(call.args) < 3:
        cut = set(range(x.dim()))  # it rolls the flattened tensor
    if call.op is aten.slice.Tensor and out.shape == x.shape:
        cut = set()
    return _mapped(call, {dim: dim for dim in range(x.dim()) if dim not in cut})


def _cut_dims(call: OpCall) -> Sequence[int]:
    position = {aten.slice.Tensor: 1, aten.flip.default: 1}.get(call.op, 2)
    dims = call.args[position] if len(call.args) > position else 0
    return list(dims) if isinstance(dims, Sequence) else [dims]


@rule(aten.slice_backward.default, aten.select_backward.default)
def padded_backward_rule(call: OpCall) -> list[Row]:
    """The gradient of a slice: zeros around it, in the dim that was cut."""
    (out,) = call.outputs
    assert out is not None
    cut = call.args[2] % out.dim()
    drops = call.op is aten.select_backward.default
    return _mapped(call, {dim - (drops and dim > cut): dim for dim in range(out.dim()) if dim != cut})


@rule(aten.constant_pad_nd.default)
def pad_rule(call: OpCall) -> list[Row]:
    """Padded dims must be whole; only zeros keep a partial sum one."""
    (x,) = call.inputs
    padding = call.args[1]
    padded = {x.dim() - 1 - i // 2 for i, width in enumerate(padding) if width}
    rows = _mapped(call, {dim: dim for dim in range(x.dim()) if dim not in padded})
    return rows if len(call.args) < 3 or call.args[2] == 0 else rows[1:]


@rule(aten.tril.default, aten.triu.default)
def triangle_rule(call: OpCall) -> list[Row]:
    """Leading dims are a batch of matrices."""
    return _mapped(call, {dim: dim for dim in range(call.inputs[0].dim() - 2)})


@rule(aten.cat.default, aten.stack.default)
def concatenate_rule(call: OpCall) -> list[Row]:
    """All inputs alike, on any dim but the joined one."""
    (out,) = call.outputs
    assert out is not None
    joined = (call.args[1] if len(call.args) > 1 else 0) % out.dim()
    stacks = call.op is aten.stack.default
    rows: list[Row] = [same(P, call)]
    for dim in range(out.dim()):
        if dim != joined:
            source = dim - (stacks and dim > joined)
            rows += [
                ((shard(dim, factor),), (shard(source, factor),) * len(call.inputs)) for factor in call.split_factors
            ]
    return rows


@rule(aten.view.default)
def view_rule(call: OpCall) -> list[Row]:
    """Follow the elements: a shard cuts the flattened tensor into (before, ranks, after), wherever dims begin and end.

    In a dim of size n with ``before`` elements of outer dims merged into it, the shard is strided by that factor.
    """
    (x,), (out,) = call.inputs, call.outputs
    assert out is not None
    rows: list[Row] = [((P,), (P,))]
    for dim in range(x.dim()):
        outer = math.prod(x.shape[:dim])
        for factor in call.split_factors:
            target = _dim_holding(out.shape, outer * factor)
            if target is not None:
                rows.append(((shard(*target),), (shard(dim, factor),)))
    return rows


def _dim_holding(shape: Sequence[int], before: int) -> tuple[int, int] | None:
    """The dim of ``shape`` that the cut after ``before`` blocks falls into, and its split factor.

    Whether the dim divides by ranks times split factor is checked with the other rows' evenness.
    """
    outer = 1
    for dim, size in enumerate(shape):
        if size > 1 and outer <= before < outer * size and before % outer == 0:
            return dim, before // outer
        outer *= size
    return None
