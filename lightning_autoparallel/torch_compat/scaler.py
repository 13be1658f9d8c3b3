"""Gradient scalers whose gradients lie in shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def unscale_shards(scaler: GradScaler, agree: Callable[[Tensor], None]) -> None:
    """Make ``scaler`` unscale this rank's parts, and give ``agree`` what it found: 1.0 where a value is not finite.

    ``agree`` is called once per optimizer step, on every rank, and makes the 0-dim float32 tensor equal on all of them.
    DTensor's own way asks the mesh of the first gradient only, which says nothing of others that lie elsewhere.
    """

    def unscale(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in _local_gradients(optimizer):
            by_dtype[gradient.dtype].append(gradient)
        if torch.float16 in by_dtype and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own words
        with torch.no_grad():
            for gradients in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
            agree(found_inf)
        return {found_inf.device: found_inf} if by_dtype else {}

    changed: Any = scaler
    changed._unscale_grads_ = unscale


def _local_gradients(optimizer: Optimizer) -> list[Tensor]:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
