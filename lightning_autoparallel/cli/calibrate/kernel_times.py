"""Kernels of the kinds that steps are made of, timed on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autoparallel.cli.calibrate.samples import KernelSample
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch

_CPU_WIDTHS, _GPU_WIDTHS = (64, 128, 256, 512), (512, 1024, 2048, 4096, 8192)
_CPU_LENGTHS, _GPU_LENGTHS = (128, 256, 512), (1024, 2048, 4096)
_CPU_SIZES, _GPU_SIZES = range(12, 25, 3), range(16, 31, 3)  # powers of two, in bytes
_HEADS, _HEAD_WIDTH = 4, 64


def kernel_samples(stopwatch: Stopwatch, dtypes: Sequence[torch.dtype]) -> Iterator[KernelSample]:
    """One sample after the other: adding tensors, matrix products, attention there and back."""
    on_cpu = stopwatch.device.type == "cpu"
    for power in _CPU_SIZES if on_cpu else _GPU_SIZES:
        yield _sum(stopwatch, 2**power)
    for dtype in dtypes:
        for width in _CPU_WIDTHS if on_cpu else _GPU_WIDTHS:
            yield _product(stopwatch, width, dtype)
        for length in _CPU_LENGTHS if on_cpu else _GPU_LENGTHS:
            yield _attention(stopwatch, length, dtype)


def _sum(stopwatch: Stopwatch, size_bytes: int) -> KernelSample:
    """Two tensors are read and one is written, of a third of the bytes each."""
    left, right, out = (torch.ones(size_bytes // 12, device=stopwatch.device) for _ in range(3))
    time_us = stopwatch.time_us(lambda: torch.add(left, right, out=out))
    return KernelSample(work="memory", dtype="float32", size_bytes=12 * left.numel(), flops=0, time_us=time_us)


def _product(stopwatch: Stopwatch, width: int, dtype: torch.dtype) -> KernelSample:
    """A batch of ``4 * width`` rows through a layer of ``width`` by ``width``."""
    left = torch.randn(4 * width, width, device=stopwatch.device).to(dtype)
    right = torch.randn(width, width, device=stopwatch.device).to(dtype)
    time_us = stopwatch.time_us(lambda: left @ right)
    size_bytes = (2 * left.numel() + right.numel()) * dtype.itemsize
    flops = 2 * left.numel() * width
    return KernelSample(work="matmul", dtype=name_of(dtype), size_bytes=size_bytes, flops=flops, time_us=time_us)


def _attention(stopwatch: Stopwatch, length: int, dtype: torch.dtype) -> KernelSample:
    """Causal, forward and backward, which compute 2 and 5 products of half of the pairs."""
    shape = (2, _HEADS, length, _HEAD_WIDTH)
    query, key, value = (torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_() for _ in range(3))

    def run() -> Sequence[Tensor]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    time_us = stopwatch.time_us(run)
    flops = 7 * 2 * 2 * _HEADS * length * length // 2 * _HEAD_WIDTH
    size_bytes = 12 * query.numel() * dtype.itemsize
    return KernelSample(work="attention", dtype=name_of(dtype), size_bytes=size_bytes, flops=flops, time_us=time_us)


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
