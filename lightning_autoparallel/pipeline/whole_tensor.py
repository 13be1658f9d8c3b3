"""A DTensor's whole tensor, for eager code; autograd knows it as a function of the DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.owed_gradients import cut_like, mean_over_shards


class WholeTensor(torch.autograd.Function):
    """Gathers it; its gradient is the mean over the batch shards. Every rank takes part in both."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, mesh: ParallelMesh) -> Tensor:
        ctx.mesh, ctx.like = mesh, tensor.detach()
        whole: Tensor = ctx.like.full_tensor()
        # A replica's own memory would be changed by whoever changes the result.
        return whole.clone() if _shares_memory(whole, tensor) else whole

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        return cut_like(mean_over_shards(gradient, ctx.mesh), ctx.like), None


def _shares_memory(whole: Tensor, tensor: DTensor) -> bool:
    return whole.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
