"""What tensors take of memory while something runs, to the byte: the allocator's count on CUDA, its calls on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ALLOCATION = "[memory]"  # the profiler's name for what a tensor's memory was taken or given back by


@dataclass
class PeakAbove:
    """``peak_bytes`` above what was allocated at the start, or of all, once what was measured has ended."""

    peak_bytes: int = 0
    is_of_all: bool = False


@contextlib.contextmanager
def peak_on_cpu() -> Iterator[PeakAbove]:
    """The most bytes that tensors on CPUs take inside above those at the start.

    Every allocation of this thread is counted, whoever makes it: operators, compiled code, optimizers. What was
    allocated before counts as held, also once it is freed.
    """
    found = PeakAbove()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    results: Any = profiled.profiler
    calls = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == _ALLOCATION and event.device_type() == DeviceType.CPU
    ]
    size = 0
    for _, taken in sorted(calls, key=lambda call: call[0]):
        size += taken
        found.peak_bytes = max(found.peak_bytes, size)


@contextlib.contextmanager
def peak_on_cuda(device: torch.device) -> Iterator[PeakAbove]:
    """The most bytes that tensors on a CUDA device take inside, whoever holds them, by its allocator."""
    found = PeakAbove(is_of_all=True)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.peak_bytes = torch.cuda.max_memory_allocated(device)
