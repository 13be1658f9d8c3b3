"""One kernel for many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, 0-dim and in float32 or wider; 0 for an empty one."""
    parts = list(map(_as_real, tensors))
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return list(torch._foreach_norm(parts, 2, dtype=wide))


def scale_together(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor in place by the 0-dim ``factor``."""
    torch._foreach_mul_(list(map(_as_real, tensors)), factor)


def _as_real(tensor: Tensor) -> Tensor:
    """The memory of a tensor as real numbers, whose norm is the same; so it is that of its conjugates."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
