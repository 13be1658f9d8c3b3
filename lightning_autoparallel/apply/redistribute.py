"""Redistributions written out as functional collectives.

A shard of an uneven dim is padded to the same size on every rank, so all ranks run one graph; the padding is cut off
after a gather and added before a scatter. A dim that several axes cut must divide evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import (
    cut_order,
    dim_of,
    explicit,
    fit_together,
    is_shard,
    local_factor,
    local_shape,
    shard,
)
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.sharding import split_factor_of

aten = torch.ops.aten


def redistribute(
    emitter: GraphEmitter,
    node: fx.Node,
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    axes: Sequence[PlanAxis],
    joint_axes: Sequence[PlanAxis] = (),
) -> fx.Node:
    """The value of ``node`` (global ``shape``, placed as ``source``) placed as ``target``.

    What makes the tensor smaller comes first: slices, reduce-scatters, all-to-alls; then all-reduces, then gathers.
    ``joint_axes`` are flattened groups of several ``axes``: one collective on one of them replaces one on each.
    """
    return _Redistribution(emitter, node, shape, explicit(source, axes), axes, joint_axes).to(explicit(target, axes))


class _Redistribution:
    """A value on its way: ``current`` are its explicit placements."""

    def __init__(
        self,
        emitter: GraphEmitter,
        node: fx.Node,
        shape: Sequence[int],
        source: Placements,
        axes: Sequence[PlanAxis],
        joint_axes: Sequence[PlanAxis],
    ) -> None:
        assert fit_together(source, axes, shape), f"{source} does not divide {list(shape)} evenly"
        self._emitter, self._node, self._shape, self._axes = emitter, node, shape, axes
        self._current = source
        self._joint = {axis.mesh_axes: axis for axis in joint_axes}

    def to(self, target: Placements) -> fx.Node:
        """Take steps until ``target`` is reached."""
        assert fit_together(target, self._axes, self._shape), f"{target} does not divide {list(self._shape)} evenly"
        while self._current != target:
            positions = self._next(target)
            goal = [target[i] for i in positions]
            if any(is_shard(self._current[i]) and not self._may_become(i, target[i]) for i in positions):
                # Something else cuts the dim where this axis should: it makes room first.
                goal = [Replicate()] * len(positions)
            self._step(positions, goal)
        return self._node

    def _next(self, target: Placements) -> list[int]:
        """The axes to move in one step."""
        pending = [i for i in range(len(self._axes)) if self._current[i] != target[i]]
        into = [i for i in pending if is_shard(target[i]) and self._may_become(i, target[i])]
        sliced = [i for i in into if isinstance(self._current[i], Replicate)]
        scattered = [i for i in into if isinstance(self._current[i], Partial)]
        turned = [i for i in into if is_shard(self._current[i])]
        reduced = [i for i in pending if isinstance(self._current[i], Partial) and not is_shard(target[i])]
        gathered = [i for i in pending if is_shard(self._current[i])]
        if sliced or (turned and not scattered):
            return (sliced or turned)[:1]
        if scattered:
            return self._run(scattered, target)
        if reduced:
            return reduced if self._joint_axis(reduced) else reduced[:1]
        whole = [i for i in gathered if not is_shard(target[i]) or self._is_recut(i, target[i])] or gathered
        assert whole, f"no collective turns {self._current} into {target}"
        return self._run(whole, self._current, last=True)

    def _may_become(self, position: int, placement: Placement) -> bool:
        if is_shard(self._current[position]) and self._is_recut(position, placement):
            return False  # it is gathered and cut anew
        changed = tuple(placement if k == position else other for k, other in enumerate(self._current))
        return fit_together(changed, self._axes, self._shape)

    def _is_recut(self, position: int, placement: Placement) -> bool:
        """Whether a shard becomes another interleaving of the same dim."""
        return is_shard(placement) and dim_of(self._current[position]) == dim_of(placement)

    def _run(self, positions: list[int], placements: Placements, last: bool = False) -> list[int]:
        """The axes among ``positions`` that cut one dim one inside the other, if one group joins them; else one."""
        first = positions[-1] if last else positions[0]
        order = [i for i in cut_order(placements, dim_of(placements[first])) if i in positions]
        touching = all(
            split_factor_of(placements[k]) == split_factor_of(placements[i]) * self._axes[i].size
            for i, k in itertools.pairwise(order)
        )
        if len(order) > 1 and touching and order == sorted(order) and self._joint_axis(order):
            return order
        return [order[-1] if last else order[0]]

    def _joint_axis(self, positions: Iterable[int]) -> PlanAxis | None:
        chosen = [self._axes[i] for i in positions]
        return chosen[0] if len(chosen) == 1 else self._joint.get(tuple(n for axis in chosen for n in axis.mesh_axes))

    def _step(self, positions: list[int], goal: list[Placement]) -> None:
        axis = self._joint_axis(positions)
        assert axis is not None
        change = dict(zip(positions, goal, strict=True))
        after = tuple(change.get(i, placement) for i, placement in enumerate(self._current))
        rest = tuple(Replicate() if i in change else placement for i, placement in enumerate(self._current))
        whole = local_shape(self._shape, rest, self._axes)
        source, target = self._local(self._current, positions[0]), self._local(after, positions[0])
        self._node = _over_axis(self._emitter, self._node, whole, source, target, axis)
        self._current = after

    def _local(self, placements: Placements, position: int) -> Placement:
        """The placement as it cuts what the other axes have left."""
        placement = placements[position]
        if not is_shard(placement):
            return placement
        return shard(dim_of(placement), local_factor(placements, self._axes, position))


def _over_axis(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], source: Placement, target: Placement, axis: PlanAxis
) -> fx.Node:
    """One transition over one axis; ``whole`` is the shape of a value replicated over it."""
    if isinstance(source, Replicate):
        assert is_shard(target), f"no collective turns {source} into {target}"
        return _take_own_part(emitter, node, whole, target, axis)
    if isinstance(source, Partial):
        if isinstance(target, Replicate):
            reduced = emitter.call(collectives.ALL_REDUCE, emitter.contiguous(node), source.reduce_op, axis.group_name)
            return emitter.call(collectives.WAIT, reduced)
        return _reduce_scatter(emitter, node, whole, source.reduce_op, target, axis)
    if isinstance(target, Replicate):
        return _all_gather(emitter, node, whole, source, axis)
    return _all_to_all(emitter, node, whole, source, target, axis)


def _split_shape(whole: Sequence[int], placement: Placement, size: int) -> tuple[list[int], int]:
    """``whole`` with the sharded dim as (blocks, ranks, part), and where ranks stand in it."""
    dim, factor = dim_of(placement), split_factor_of(placement)
    part = math.ceil(whole[dim] / (factor * size))
    return [*whole[:dim], factor, size, part, *whole[dim + 1 :]], dim + 1


def _ranks_first(
    emitter: GraphEmitter, node: fx.Node, whole: list[int], placement: Placement, axis: PlanAxis
) -> fx.Node:
    """(ranks, local shape...): the parts of a whole value, one after another, padded where they are uneven."""
    dim = dim_of(placement)
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
    dim, part = dim_of(target), math.ceil(whole[dim_of(target)] / axis.size)
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
    dim, factor = dim_of(source), split_factor_of(source)
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
    if dim_of(source) == dim_of(target):
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
    dim, factor = dim_of(source), split_factor_of(source)
    split = [axis.size, *shape[1 : dim + 1], factor, shape[dim + 1] // factor, *shape[dim + 2 :]]
    order = [*range(1, dim + 2), 0, *range(dim + 2, len(split))]
    joined = emitter.contiguous(emitter.call(aten.permute.default, emitter.view(received, split), order))
    return emitter.view(joined, [*shape[1 : dim + 1], shape[dim + 1] * axis.size, *shape[dim + 2 :]])
