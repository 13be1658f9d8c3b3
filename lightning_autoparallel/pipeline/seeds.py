"""Torch's generators at a place of their own for a while."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def generators_at(text: str, device: torch.device) -> Iterator[None]:
    """The host's generator and the device's are seeded by ``text``, and afterwards what they were."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
