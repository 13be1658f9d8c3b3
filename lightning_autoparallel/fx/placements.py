"""How several mesh axes cut one tensor: the order of cuts on a dim, local shapes, and placements as text.

Every sharded axis cuts its dim in the pattern (before, ranks, rest): a plain shard has one block before, a strided one
``split_factor`` blocks, each of which is shared out. Axes with plain shards of the same dim are nested, the outer axis
first, as DTensor reads them. Written with their blocks before, placements of all axes can change independently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.torch_compat.sharding import StridedShard, split_factor_of


def shard(dim: int, split_factor: int = 1) -> Placement:
    """``S(dim)``; strided when the dim's elements come in ``split_factor`` blocks of which each rank holds a part."""
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


def is_shard(placement: Placement | None) -> bool:
    """Whether a placement is a shard, plain or strided."""
    return isinstance(placement, (Shard, StridedShard))


def dim_of(placement: Placement) -> int:
    """The dim that a shard cuts."""
    assert isinstance(placement, (Shard, StridedShard))
    return placement.dim


def explicit(placements: Placements, axes: Sequence[PlanAxis]) -> Placements:
    """The same placements with nested plain shards written as strided ones: what an inner axis finds cut already."""
    result = list(placements)
    for i, placement in enumerate(placements):
        if is_shard(placement):
            same = [k for k in range(i) if placements[k] == placement]
            outer = math.prod(axes[k].size for k in same)
            result[i] = shard(dim_of(placement), split_factor_of(placement) * outer)
    return tuple(result)


def cut_order(placements: Placements, dim: int) -> list[int]:
    """The positions of the axes that cut ``dim``, outermost cut first; ``placements`` are explicit."""
    cutting = [i for i, placement in enumerate(placements) if is_shard(placement) and dim_of(placement) == dim]
    return sorted(cutting, key=lambda i: split_factor_of(placements[i]))


def fit_together(placements: Placements, axes: Sequence[PlanAxis], shape: Sequence[int]) -> bool:
    """Whether each dim that several axes cut falls into even parts, cut after cut; ``placements`` are explicit."""
    orders = [cut_order(placements, dim) for dim in range(len(shape))]
    return all(
        len(order) < 2 or divides(order, placements, axes, size) for order, size in zip(orders, shape, strict=True)
    )


def divides(order: Sequence[int], cuts: Placements, axes: Sequence[PlanAxis], size: int) -> bool:
    """Whether the axes at positions ``order``, the first cut first, cut a dim of ``size`` into even parts."""
    end = 1
    for i in order:
        factor = split_factor_of(cuts[i])
        if factor % end:
            return False
        end = factor * axes[i].size
    return size % end == 0


def touch(order: Sequence[int], cuts: Placements, axes: Sequence[PlanAxis]) -> bool:
    """Whether no other cut, and no block, comes before or between those of ``order``: the cuts are nested."""
    end = 1
    for i in order:
        if split_factor_of(cuts[i]) != end:
            return False
        end *= axes[i].size
    return True


def can_be(placements: Placements, axes: Sequence[PlanAxis], shape: Sequence[int]) -> bool:
    """Whether each dim falls into even parts or into nested chunks (``fx.chunks``); ``placements`` are explicit."""
    orders = [cut_order(placements, dim) for dim in range(len(shape))]
    return all(
        divides(order, placements, axes, size) or touch(order, placements, axes)
        for order, size in zip(orders, shape, strict=True)
    )


def can_become(before: Placements, after: Placements, axes: Sequence[PlanAxis], shape: Sequence[int]) -> bool:
    """Whether the dims that axes stop or start to cut fall into even parts before and after, or into nested chunks.

    Which rows an inner axis cuts depends on the axes further out where a dim is uneven: those can neither come nor go.
    """
    changed = [sides for sides in zip(before, after, strict=True) if sides[0] != sides[1]]
    for dim in {dim_of(placement) for sides in changed for placement in sides if is_shard(placement)}:
        sides = [(cut_order(side, dim), side) for side in (before, after)]
        if not all(divides(order, side, axes, shape[dim]) for order, side in sides) and not all(
            touch(order, side, axes) for order, side in sides
        ):
            return False
    return True


def local_shape(shape: Sequence[int], placements: Placements, axes: Sequence[PlanAxis]) -> list[int]:
    """The (padded) shape of one rank's part of a tensor of global ``shape``."""
    local = list(shape)
    for placement, axis in zip(placements, axes, strict=True):
        if is_shard(placement):
            local[dim_of(placement)] = math.ceil(local[dim_of(placement)] / axis.size)
    return local


def nested_shards(dim: int, order: Sequence[int], axes: Sequence[PlanAxis]) -> Placements:
    """Placements in which the axes at positions ``order`` cut ``dim``, the first one outermost; others replicate."""
    placements: list[Placement] = [Replicate()] * len(axes)
    before = 1
    for i in order:
        placements[i] = shard(dim, before)
        before *= axes[i].size
    if list(order) == sorted(order):
        # Outer axes cut first: that is what plain shards mean.
        return tuple(shard(dim) if is_shard(placement) else placement for placement in placements)
    return tuple(placements)


def parse_placement(text: str, rank: int) -> Placement:
    """``"R"`` or ``"S(dim)"`` for a tensor of ``rank`` dims, negative dims from the end.

    Raises:
        ValueError: the dim does not exist.
    """
    if text == "R":
        return Replicate()
    match = re.fullmatch(r"S\((-?\d+)\)", text)
    assert match is not None, text
    dim = int(match[1])
    if not -rank <= dim < rank:
        raise ValueError(f"{text} of a tensor of {rank} dims")
    return Shard(dim % rank)


def rule_text(placement: Placement) -> str:
    """A placement as rules have it: in which blocks axes cut one dim follows from the order in which they do."""
    return placement_text(shard(dim_of(placement)) if is_shard(placement) else placement)


def placement_text(placement: Placement) -> str:
    """``R``, ``S(0)``, ``S(0, 4 blocks)``, ``P(sum)``."""
    if isinstance(placement, Replicate):
        return "R"
    if is_shard(placement):
        factor = split_factor_of(placement)
        return f"S({dim_of(placement)})" if factor == 1 else f"S({dim_of(placement)}, {factor} blocks)"
    return f"P({placement.reduce_op})"  # type: ignore[attr-defined]


def placed_text(inputs: Sequence[Placement], outputs: Sequence[Placement | None]) -> str:
    """Where a call has its results and operands on one axis: ``S(0) from R, S(1)``; ``-`` is no tensor."""
    made = ", ".join("-" if placement is None else placement_text(placement) for placement in outputs)
    read = ", ".join(map(placement_text, inputs))
    return f"{made} from {read}" if read else made
