"""Values of tensors."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """A tensor's values in few characters, for ranks to compare."""
    values = tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.blake2b(values, digest_size=8).hexdigest()
