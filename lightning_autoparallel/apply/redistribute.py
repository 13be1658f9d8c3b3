"""Redistributions written out as functional collectives.

A shard of an uneven dim is padded to the same size on every rank, so all ranks run one graph; the padding is cut off
after a gather and added before a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.sharding import StridedShard, split_factor_of

aten = torch.ops.aten


def local_shape(shape: Sequence[int], placements: Placements, axes: Sequence[PlanAxis]) -> list[int]:
    """The (padded) shape of one rank's part of a tensor of global ``shape``."""
    local = list(shape)
    for placement, axis in zip(placements, axes, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            local[placement.dim] = math.ceil(local[placement.dim] / axis.size)
    return local


def redistribute(
    emitter: GraphEmitter,
    node: fx.Node,
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    axes: Sequence[PlanAxis],
) -> fx.Node:
    """The value of ``node`` (global ``shape``, placed as ``source``) placed as ``target``.

    Axes are gathered and reduced innermost first, then scattered outermost first. A shard nested in one that changes
    in the same dim is gathered for the while, so that nested shards keep their order.
    """
    current = list(source)
    detours = _gathered_meanwhile(source, target)
    steps = [(i, Replicate() if i in detours else target[i]) for i in reversed(range(len(axes)))]
    steps = [(i, placement) for i, placement in steps if not _is_shard(placement)]
    for i, placement in [*steps, *enumerate(target)]:
        if current[i] != placement:
            rest = [Replicate() if k == i else other for k, other in enumerate(current)]
            whole = local_shape(shape, tuple(rest), axes)
            node = _over_axis(emitter, node, whole, current[i], placement, axes[i])
            current[i] = placement
    return node


def _gathered_meanwhile(source: Placements, target: Placements) -> set[int]:
    """The axes whose shard lies inside a shard, of an outer axis and the same dim, that comes, goes or is gathered."""
    found: set[int] = set()
    pending = [i for i in range(len(source)) if source[i] != target[i]]
    while pending:
        i = pending.pop()
        dims = {_dim(placement) for placement in (source[i], target[i]) if _is_shard(placement)}
        inner = [k for k in range(i + 1, len(source)) if _is_shard(source[k]) and _dim(source[k]) in dims]
        pending += [k for k in inner if k not in found]
        found.update(inner)
    return found


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, (Shard, StridedShard))


def _over_axis(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], source: Placement, target: Placement, axis: PlanAxis
) -> fx.Node:
    """One transition over one axis; ``whole`` is the shape of a value replicated over it."""
    if isinstance(source, Replicate):
        assert _is_shard(target), f"no collective turns {source} into {target}"
        return _take_own_part(emitter, node, whole, target, axis)
    if isinstance(source, Partial):
        if isinstance(target, Replicate):
            reduced = emitter.call(collectives.ALL_REDUCE, emitter.contiguous(node), source.reduce_op, axis.group_name)
            return emitter.call(collectives.WAIT, reduced)
        return _reduce_scatter(emitter, node, whole, source.reduce_op, target, axis)
    if isinstance(target, Replicate):
        return _all_gather(emitter, node, whole, source, axis)
    return _all_to_all(emitter, node, whole, source, target, axis)


def _dim(placement: Placement) -> int:
    assert isinstance(placement, (Shard, StridedShard))
    return placement.dim


def _split_shape(whole: Sequence[int], placement: Placement, size: int) -> tuple[list[int], int]:
    """``whole`` with the sharded dim as (blocks, ranks, part), and where ranks stand in it."""
    dim, factor = _dim(placement), split_factor_of(placement)
    part = math.ceil(whole[dim] / (factor * size))
    return [*whole[:dim], factor, size, part, *whole[dim + 1 :]], dim + 1


def _ranks_first(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], placement: Placement, axis: PlanAxis
) -> fx.Node:
    """(ranks, local shape...): the parts of a whole value, one after another, padded where they are uneven."""
    dim = _dim(placement)
    split, position = _split_shape(whole, placement, axis.size)
    missing = math.prod(split[dim : dim + 3]) - whole[dim]
    if missing:
        padding = [0, 0] * (len(whole) - 1 - dim) + [0, missing]
        node = emitter.call(aten.constant_pad_nd.default, node, padding)
    node = emitter.view(emitter.contiguous(node), split)
    order = [position, *(i for i in range(len(split)) if i != position)]
    node = emitter.contiguous(emitter.call(aten.permute.default, node, order))
    part = [*whole[:dim], split[dim] * split[dim + 2], *whole[dim + 1 :]]
    return emitter.view(node, [axis.size, *part])


def _take_own_part(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], target: Placement, axis: PlanAxis
) -> fx.Node:
    dim, part = _dim(target), math.ceil(whole[_dim(target)] / axis.size)
    if split_factor_of(target) == 1 and part * axis.size == whole[dim]:
        return emitter.call(aten.slice.Tensor, node, dim, axis.rank * part, (axis.rank + 1) * part)
    parts = _ranks_first(emitter, node, whole, target, axis)
    return emitter.call(aten.select.int, parts, 0, axis.rank)


def _reduce_scatter(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], reduce_op: str, target: Placement, axis: PlanAxis
) -> fx.Node:
    parts = _ranks_first(emitter, node, whole, target, axis)
    shape = list(parts.meta["val"].shape)
    flat = emitter.view(parts, [shape[0] * shape[1], *shape[2:]]) if len(shape) > 1 else parts
    scattered = emitter.call(collectives.REDUCE_SCATTER, flat, reduce_op, axis.size, axis.group_name)
    return emitter.view(emitter.call(collectives.WAIT, scattered), shape[1:])


def _all_gather(emitter: GraphEmitter, node: fx.Node, whole: list[int], source: Placement, axis: PlanAxis) -> fx.Node:
    dim, factor = _dim(source), split_factor_of(source)
    local = list(node.meta["val"].shape)
    gathered = emitter.call(collectives.ALL_GATHER, emitter.contiguous(node), axis.size, axis.group_name)
    gathered = emitter.call(collectives.WAIT, gathered)
    if dim != 0 or factor != 1:
        split = [axis.size, *local[:dim], factor, local[dim] // factor, *local[dim + 1 :]]
        gathered = emitter.view(gathered, split)
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(split))]
        gathered = emitter.contiguous(emitter.call(aten.permute.default, gathered, order))
    full = [*whole[:dim], local[dim] * axis.size, *whole[dim + 1 :]]
    gathered = emitter.view(gathered, full)
    if full[dim] != whole[dim]:
        gathered = emitter.call(aten.slice.Tensor, gathered, dim, 0, whole[dim])
    return gathered


def _all_to_all(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], source: Placement, target: Placement, axis: PlanAxis
) -> fx.Node:
    """Cut the local part by the target, send each piece to its owner, and join the received ones by the source."""
    if _dim(source) == _dim(target):
        # The same dim in another interleaving: rare, and a gather is right.
        node = _all_gather(emitter, node, whole, source, axis)
        return _take_own_part(emitter, node, whole, target, axis)
    local = list(node.meta["val"].shape)
    pieces = _ranks_first(emitter, node, local, target, axis)
    shape = list(pieces.meta["val"].shape)
    flat = emitter.view(pieces, [math.prod(shape)])
    equal = [math.prod(shape[1:])] * axis.size
    received = emitter.call(collectives.ALL_TO_ALL, flat, equal, equal, axis.group_name)
    received = emitter.view(emitter.call(collectives.WAIT, received), shape)
    dim, factor = _dim(source), split_factor_of(source)
    split = [axis.size, *shape[1 : dim + 1], factor, shape[dim + 1] // factor, *shape[dim + 2 :]]
    order = [*range(1, dim + 2), 0, *range(dim + 2, len(split))]
    joined = emitter.contiguous(emitter.call(aten.permute.default, emitter.view(received, split), order))
    return emitter.view(joined, [*shape[1 : dim + 1], shape[dim + 1] * axis.size, *shape[dim + 2 :]])
