"""Full tensors cut into what each rank of one axis would hold, and put together again: the oracle of placements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from lightning_autoparallel.torch_compat.sharding import StridedShard

R, P = Replicate(), Partial("sum")


def S(dim: int, split_factor: int = 1) -> Placement:
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


def cut(full: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The part of every rank; addends of a partial sum are random, uneven shards are padded with noise."""
    if isinstance(placement, Replicate):
        return [full.clone() for _ in range(size)]
    if isinstance(placement, Partial):
        return _addends(full, size)
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
        return torch.stack(parts).sum(0).to(parts[0].dtype)
    dim, factor = placement.dim, _factor(placement)
    blocks = [part.chunk(factor, dim) for part in parts]
    full = torch.cat([blocks[rank][i] for i in range(factor) for rank in range(len(parts))], dim)
    return full.narrow(dim, 0, shape[dim])


def _factor(placement: Placement) -> int:
    return placement.split_factor if isinstance(placement, StridedShard) else 1


def _addends(full: Tensor, size: int) -> list[Tensor]:
    if full.dtype is torch.bool:
        return [full.clone(), *(torch.zeros_like(full) for _ in range(size - 1))]
    scale = torch.randn if full.is_floating_point() else lambda shape: torch.randint(-9, 9, shape)
    addends = [scale(full.shape).to(full.dtype) for _ in range(size - 1)]
    return [full - sum(addends), *addends]
