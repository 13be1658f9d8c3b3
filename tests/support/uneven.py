"""Uneven dims in nested chunks: what each rank holds of a full tensor, and the full tensor of that; the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import cut_order, explicit, is_shard, local_shape, touch
from tests.support.redistributions import axes_of, joined_from_all, parts_of_all


def nested_parts_of_all(full: Tensor, placements: Placements, sizes: Sequence[int]) -> list[Tensor]:
    """As ``parts_of_all``; every axis cuts what the one before left of the rows without padding."""
    parts = []
    for rank, addend in enumerate(parts_of_all(full, without_cuts(placements), sizes)):
        axes = axes_of(rank, *sizes)
        part = torch.full(local_shape(full.shape, placements, axes), 77, dtype=full.dtype)
        rows = own_rows(full.shape, placements, axes)
        part[tuple(slice(len(own)) for own in rows)] = addend[torch.meshgrid(*rows, indexing="ij")]
        parts.append(part)
    return parts


def nested_joined_from_all(parts: list[Tensor], target: Placements, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
    """As ``joined_from_all``."""
    whole: dict[tuple[int, ...], Tensor] = {}  # by rank on the axes that cut nothing
    uncut = []
    for rank, part in enumerate(parts):
        axes = axes_of(rank, *sizes)
        elsewhere = tuple(axis.rank for axis, placement in zip(axes, target, strict=True) if not is_shard(placement))
        rows = own_rows(shape, target, axes)
        # A row that no rank has stays what it is here.
        into = whole.setdefault(elsewhere, torch.full(shape, -99, dtype=part.dtype))
        into[torch.meshgrid(*rows, indexing="ij")] = part[tuple(slice(len(own)) for own in rows)]
        uncut.append(into)
    return joined_from_all(uncut, without_cuts(target), shape, sizes)


def own_rows(shape: Sequence[int], placements: Placements, axes: Sequence[PlanAxis]) -> list[Tensor]:
    """The indices that a rank has of every dim."""
    cuts = explicit(placements, axes)
    found = []
    for dim, size in enumerate(shape):
        rows = torch.arange(size)
        order = cut_order(cuts, dim)
        assert touch(order, cuts, axes), f"{placements} cut dim {dim} into blocks"
        for i in order:
            chunks = rows.chunk(axes[i].size)
            rows = chunks[axes[i].rank] if axes[i].rank < len(chunks) else rows[:0]
        found.append(rows)
    return found


def without_cuts(placements: Placements) -> Placements:
    """The same placements with every shard whole."""
    return tuple(Replicate() if is_shard(placement) else placement for placement in placements)
