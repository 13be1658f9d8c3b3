"""Tensors of some ranks, gathered so that a gradient goes back to the rank that each is of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def gathered_with_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of ``group``, alike in shape (...), stacked by rank: (ranks, ...).

    The gradient of each is the sum of those that the ranks have for it. ``torch.distributed.nn`` does so for the world
    alone: over gloo it takes places in a group for ranks of the world.
    """
    return _Gathered.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
