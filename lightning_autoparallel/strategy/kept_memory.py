"""On a CPU, memory that a step frees stays with the process, as it does with CUDA's allocator: the next step takes it.

glibc gives the free end of its heap back to the system where that is larger than twice the largest block it has mapped
for itself. Whether a step ends so hangs on what happens to lie last, so that of equal processes some wait in each step
for thousands of pages that they had a moment ago. Blocks that glibc maps by themselves (above 32 MiB) are not kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

import torch

# Of mallopt(3): what free end of the heap is given back, -1 for none, and from which size blocks are mapped.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_IN_HEAP = 2**25  # glibc comes to this by itself; it has to be said because saying the other ends that
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@contextlib.contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """While open, what steps on a CPU free is theirs; it is given back behind them.

    Nothing is done for other devices, without glibc, and where the environment says how its allocator is to be.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if device.type != "cpu" or not hasattr(libc, "gnu_get_libc_version") or is_chosen(os.environ):
        yield
        return
    assert libc is not None
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)  # as glibc has it, which cannot find it by itself again
        libc.malloc_trim(0)


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the user has told glibc's allocator what to keep."""
    return any(name in environment for name in _CHOSEN) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
