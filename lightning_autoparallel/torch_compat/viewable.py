"""Layouts in memory, asked of torch where its fake tensors answer wrongly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.tracing import unset_fake_temporarily


def can_be_viewed(value: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``value``, a fake tensor too, can be seen in another shape without a copy.

    A fake tensor says yes to some parts (a slice of one row in the middle of several dims that become one) whose real
    ones refuse.
    """
    if value.is_contiguous():
        return True
    with unset_fake_temporarily():
        laid_out = torch.empty_strided(value.shape, value.stride(), device="meta")
        try:
            laid_out.view(*shape)
        except RuntimeError:
            return False
    return True


def storage_of(tensor: Tensor) -> int:
    """Which memory the tensor shows, a fake one's too: equal for two that share it."""
    return int(tensor.untyped_storage()._cdata)
