"""One step of a redistribution as calls in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.parts import Parts, parts_of
from lightning_autoparallel.apply.redistribution_steps import Step, StepKind
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import dim_of, local_shape
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten


def take_step(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    """The local value after ``step`` of the one before it; ``shape`` is the global one."""
    return _EMITTERS[step.kind](emitter, node, shape, step, axes)


def _whole(shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]) -> list[int]:
    """The shape of a value that is cut as before the step, but by none of its axes."""
    rest = tuple(Replicate() if i in step.positions else placement for i, placement in enumerate(step.before))
    return local_shape(shape, rest, axes)


def _slice(emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]) -> fx.Node:
    (position,) = step.positions
    parts = parts_of(shape, _whole(shape, step, axes), step.after, step.positions, axes)
    dim = dim_of(step.after[position])
    if dim in parts.nested:
        start = parts.nested[dim].start_of(step.axis.rank)
        padded = parts.pad(emitter, node, dim)
        return emitter.call_of_rank(step.axis, aten.slice.Tensor, padded, dim, start, start + parts.part[dim])
    if _is_one_block(parts, dim) and parts.whole == parts.padded:
        start = step.axis.rank * parts.part[dim]
        return emitter.call_of_rank(step.axis, aten.slice.Tensor, node, dim, start, start + parts.part[dim])
    return emitter.call_of_rank(step.axis, aten.select.int, parts.separate(emitter, node), 0, step.axis.rank)


def _is_one_block(parts: Parts, dim: int) -> bool:
    """Whether a rank's part of ``dim`` is contiguous: nothing but whole dims comes before the ranks."""
    return parts.rank_dims == (dim,)


def _reduce_scatter(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    parts = parts_of(shape, _whole(shape, step, axes), step.after, step.positions, axes)
    separated = emitter.view(parts.separate(emitter, node), [parts.ranks * parts.part[0], *parts.part[1:]])
    reduce_op, divisor = _reduction(step, axes)
    scattered = emitter.call(collectives.REDUCE_SCATTER, separated, reduce_op, step.axis.size, step.axis.group_name)
    scattered = emitter.view(emitter.call(collectives.WAIT, scattered), list(parts.part))
    return _divided(emitter, scattered, divisor)


def _all_reduce(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    reduce_op, divisor = _reduction(step, axes)
    reduced = emitter.call(collectives.ALL_REDUCE, emitter.contiguous(node), reduce_op, step.axis.group_name)
    return _divided(emitter, emitter.call(collectives.WAIT, reduced), divisor)


def _reduction(step: Step, axes: Sequence[PlanAxis]) -> tuple[str, int]:
    """What the collective computes, and by what its result is divided: averages are sums, scaled once."""
    ops = [_reduce_op(step.before, i) for i in step.positions]
    if set(ops) <= {"sum", "avg"}:
        return "sum", math.prod(axes[i].size for i, op in zip(step.positions, ops, strict=True) if op == "avg")
    (op,) = ops
    return op, 1


def _reduce_op(placements: Placements, position: int) -> str:
    placement = placements[position]
    assert isinstance(placement, Partial)
    return str(placement.reduce_op)


def _divided(emitter: GraphEmitter, node: fx.Node, divisor: int) -> fx.Node:
    if divisor == 1:
        return node
    dtype = node.meta["val"].dtype
    assert dtype.is_floating_point or dtype.is_complex, f"{dtype} values have no average"
    return emitter.call(aten.div.Scalar, node, divisor)


def _all_gather(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    parts = parts_of(shape, _whole(shape, step, axes), step.before, step.positions, axes)
    gathered = emitter.call(collectives.ALL_GATHER, emitter.contiguous(node), step.axis.size, step.axis.group_name)
    return parts.join(emitter, emitter.call(collectives.WAIT, gathered))


def _all_to_all(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    """Cut the local part by the target, send each piece to its owner, and join the received ones by the source."""
    pieces = parts_of(shape, local_shape(shape, step.before, axes), step.after, step.positions, axes)
    received = _exchange(emitter, pieces.separate(emitter, node), math.prod(pieces.part), step.axis)
    joined = parts_of(shape, local_shape(shape, step.after, axes), step.before, step.positions, axes)
    return joined.join(emitter, received)


def _exchange(emitter: GraphEmitter, node: fx.Node, count: int, axis: PlanAxis) -> fx.Node:
    """``count`` values for each rank of the axis; complex ones, which no backend exchanges, as two real ones each."""
    is_complex = node.meta["val"].is_complex()
    if is_complex:
        node, count = emitter.call(aten.view_as_real.default, emitter.call(aten.resolve_conj.default, node)), 2 * count
    equal = [count] * axis.size
    sent = emitter.view(node, [count * axis.size])
    received = emitter.call(collectives.WAIT, emitter.call(collectives.ALL_TO_ALL, sent, equal, equal, axis.group_name))
    if not is_complex:
        return received
    return emitter.call(aten.view_as_complex.default, emitter.view(received, [count * axis.size // 2, 2]))


def _spread(
    emitter: GraphEmitter, node: fx.Node, shape: Sequence[int], step: Step, axes: Sequence[PlanAxis]
) -> fx.Node:
    """Local values that reduce to the one there is: equal addends of a sum, or the value itself."""
    (position,) = step.positions
    size = axes[position].size
    source, target = step.before[position], _reduce_op(step.after, position)
    if isinstance(source, Partial):
        return emitter.call(aten.mul.Scalar, node, size) if target == "avg" else _divided(emitter, node, size)
    return _divided(emitter, node, size) if target == "sum" else node


_EMITTERS: Mapping[StepKind, Callable[..., fx.Node]] = {
    "slice": _slice,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "spread": _spread,
}
__all__ = ["take_step"]
