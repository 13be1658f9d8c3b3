"""Full tensors cut into what each rank of one axis would hold, and put together again: the oracle of placements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.fx.placements import shard as S
from lightning_autoparallel.torch_compat.sharding import StridedShard

R, P, AVG, MAX, MIN = Replicate(), *(Partial(op) for op in ("sum", "avg", "max", "min"))
__all__ = ["AVG", "MAX", "MIN", "P", "R", "S", "cut", "joined"]


def cut(full: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The part of every rank; addends of a partial sum are random, uneven shards are padded with noise."""
    if isinstance(placement, Replicate):
        return [full.clone() for _ in range(size)]
    if isinstance(placement, Partial):
        return _PARTIALS[placement.reduce_op](full, size)
    dim, factor = placement.dim, _factor(placement)
    part = -(-full.shape[dim] // (size * factor))
    missing = part * size * factor - full.shape[dim]
    if missing:
        noise = torch.full([*full.shape[:dim], missing, *full.shape[dim + 1 :]], 77, dtype=full.dtype)
        full = torch.cat([full, noise], dim)
    pieces = full.split(part, dim)  # in the order block 0 rank 0, block 0 rank 1, ...
    return [torch.cat(pieces[rank::size], dim) for rank in range(size)]


def joined(parts: list[Tensor], placement: Placement, shape: torch.Size) -> Tensor:
    """The full tensor of ``shape`` that ``parts`` are the ranks' parts of; replicas must be equal."""
    if isinstance(placement, Replicate):
        assert all(torch.equal(part, parts[0]) for part in parts), "replicas differ"
        return parts[0]
    if isinstance(placement, Partial):
        return reduced(parts, placement.reduce_op)
    dim, factor = placement.dim, _factor(placement)
    blocks = [part.chunk(factor, dim) for part in parts]
    full = torch.cat([blocks[rank][i] for i in range(factor) for rank in range(len(parts))], dim)
    return full.narrow(dim, 0, shape[dim])


def reduced(parts: list[Tensor], reduce_op: str) -> Tensor:
    """What a reduction makes of all ranks' values."""
    stacked = torch.stack(parts)
    if reduce_op == "avg":
        return (stacked.sum(0) / len(parts)).to(stacked.dtype)
    return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[reduce_op](0).to(stacked.dtype)


def _factor(placement: Placement) -> int:
    return placement.split_factor if isinstance(placement, StridedShard) else 1


def _addends(full: Tensor, size: int) -> list[Tensor]:
    if full.dtype is torch.bool:
        return [full.clone(), *(torch.zeros_like(full) for _ in range(size - 1))]
    scale = torch.randn if full.is_floating_point() else lambda shape: torch.randint(-9, 9, shape)
    addends = [scale(full.shape).to(full.dtype) for _ in range(size - 1)]
    return [full - sum(addends), *addends]


def _bounded(full: Tensor, size: int, sign: int) -> list[Tensor]:
    """Values of which each element is the right one on one rank, and farther in the direction of ``sign`` on others."""
    best = torch.randint(size, full.shape)
    return [torch.where(best == rank, full, full + sign * torch.rand(full.shape)) for rank in range(size)]


_PARTIALS = {
    "sum": _addends,
    "avg": lambda full, size: _addends(full * size, size),
    "max": lambda full, size: _bounded(full, size, -1),
    "min": lambda full, size: _bounded(full, size, 1),
}
