"""On a CPU, memory that a step frees stays with the process, as it does with CUDA's allocator: the next step takes it.

glibc gives the free end of its heap back to the system where that is larger than twice the largest block it has mapped
for itself. Whether a step ends so hangs on what happens to lie last, so that of equal processes some wait in each step
for thousands of pages that they had a moment ago. Blocks that glibc maps by themselves (above 32 MiB) are not kept, nor
what other threads than the first have allocated.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from functools import cache

import torch

# Of mallopt(3): what free end of the heap is given back, -1 for none, and from which size blocks are mapped.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_IN_HEAP = 2**25  # glibc comes to this by itself; it has to be said because saying the other ends that
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(device: torch.device) -> None:
    """From now on what this process frees stays its own, until ``give_back_memory``; not in those that it forks.

    Nothing is done for other devices than CPUs, without glibc, and where the environment says how its allocator is to
    be.
    """
    libc = _settable(device)
    if libc is not None and libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP):
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        _leave_to_glibc_in_forks()


def give_back_memory(device: torch.device) -> None:
    """What this process has freed on a CPU is the system's again, and what it frees later, as glibc has it."""
    libc = _settable(device)
    if libc is not None:
        _leave_to_glibc()
        libc.malloc_trim(0)


def trim_freed_memory() -> None:
    """Give back what is free now, so that a peak of the process is not that of something before."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the user has told glibc's allocator what to keep."""
    return any(name in environment for name in _CHOSEN) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")


def _settable(device: torch.device) -> ctypes.CDLL | None:
    return _glibc() if device.type == "cpu" and not is_chosen(os.environ) else None


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def _leave_to_glibc() -> None:
    libc = _glibc()
    if libc is not None:  # to the number that it comes to by itself, which it does not look for any more
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)


@cache
def _leave_to_glibc_in_forks() -> None:
    """Workers of data loaders would each hold the most that they ever needed."""
    os.register_at_fork(after_in_child=_leave_to_glibc)
