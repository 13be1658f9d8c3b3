"""Kernels of the kinds that steps are made of, timed on one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from lightning_autoparallel.cli.calibrate.samples import KernelSample
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.cost.optimizer import ADAMW_MOVES

_CPU_WIDTHS, _GPU_WIDTHS = (64, 128, 256, 512), (512, 1024, 2048, 4096, 8192)
_CPU_LENGTHS, _GPU_LENGTHS = (128, 256, 512), (1024, 2048, 4096)
_CPU_SIZES, _GPU_SIZES = range(12, 25, 3), range(16, 31, 3)  # powers of two, in bytes
_CPU_COLD, _GPU_COLD = 2**27, 2**30  # bytes that no cache holds
_MOST_COLD = 256
_CPU_UPDATED, _GPU_UPDATED, _UPDATED = 2**20, 2**24, 4
_HEADS, _HEAD_WIDTH = 4, 64
_CPU_CHANNELS, _GPU_CHANNELS = (16, 32, 64), (64, 128, 256)
_IMAGES, _PIXELS = 8, 32


def kernel_samples(stopwatch: Stopwatch, dtypes: Sequence[torch.dtype]) -> Iterator[KernelSample]:
    """One sample after the other: adding tensors, updating parameters, products, convolutions, attention."""
    on_cpu = stopwatch.device.type == "cpu"
    for power in _CPU_SIZES if on_cpu else _GPU_SIZES:
        yield _sum(stopwatch, 2**power, _CPU_COLD if on_cpu else _GPU_COLD)
    yield _update(stopwatch, _CPU_UPDATED if on_cpu else _GPU_UPDATED)
    for dtype in dtypes:
        for width in _CPU_WIDTHS if on_cpu else _GPU_WIDTHS:
            yield _product(stopwatch, width, dtype)
        for length in _CPU_LENGTHS if on_cpu else _GPU_LENGTHS:
            yield _attention(stopwatch, length, dtype, is_causal=False)
            yield _attention(stopwatch, length, dtype, is_causal=True)
        for channels in _CPU_CHANNELS if on_cpu else _GPU_CHANNELS:
            yield _convolution(stopwatch, channels, dtype)


def _sum(stopwatch: Stopwatch, size_bytes: int, cold_bytes: int) -> KernelSample:
    """Two tensors are read and one is written, of a third of the bytes each.

    Others are taken each time, so that nothing is found in a cache: in a step, too much lies in between.
    """
    count = max(1, min(_MOST_COLD, cold_bytes // size_bytes))
    triples = [[torch.ones(size_bytes // 12, device=stopwatch.device) for _ in range(3)] for _ in range(count)]
    turns = itertools.cycle(triples)

    def add() -> None:
        left, right, out = next(turns)
        torch.add(left, right, out=out)

    size_bytes = 12 * triples[0][0].numel()
    return KernelSample(work="memory", dtype="float32", size_bytes=size_bytes, flops=0, time_us=stopwatch.time_us(add))


def _update(stopwatch: Stopwatch, count: int) -> KernelSample:
    """AdamW as users call it, over a few parameters of ``count`` elements each."""
    parameters = [torch.ones(count, device=stopwatch.device, requires_grad=True) for _ in range(_UPDATED)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    time_us = stopwatch.time_us(AdamW(parameters).step)
    size_bytes = ADAMW_MOVES * 4 * count * _UPDATED
    return KernelSample(work="optimizer", dtype="float32", size_bytes=size_bytes, flops=0, time_us=time_us)


def _product(stopwatch: Stopwatch, width: int, dtype: torch.dtype) -> KernelSample:
    """A batch of ``4 * width`` rows through a layer of ``width`` by ``width``."""
    left = torch.randn(4 * width, width, device=stopwatch.device).to(dtype)
    right = torch.randn(width, width, device=stopwatch.device).to(dtype)
    time_us = stopwatch.time_us(lambda: left @ right)
    size_bytes = (2 * left.numel() + right.numel()) * dtype.itemsize
    flops = 2 * left.numel() * width
    return KernelSample(work="product", dtype=name_of(dtype), size_bytes=size_bytes, flops=flops, time_us=time_us)


def _attention(stopwatch: Stopwatch, length: int, dtype: torch.dtype, *, is_causal: bool) -> KernelSample:
    """Forward and backward, which compute 2 and 5 products of all pairs, or of half of them."""
    shape = (2, _HEADS, length, _HEAD_WIDTH)
    query, key, value = (torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_() for _ in range(3))

    def run() -> Sequence[Tensor]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    time_us = stopwatch.time_us(run)
    flops = 7 * 2 * 2 * _HEADS * length * length // (2 if is_causal else 1) * _HEAD_WIDTH
    size_bytes = 12 * query.numel() * dtype.itemsize
    return KernelSample(
        work="attention",
        dtype=name_of(dtype),
        size_bytes=size_bytes,
        flops=flops,
        time_us=time_us,
        is_causal=is_causal,
    )


def _convolution(stopwatch: Stopwatch, channels: int, dtype: torch.dtype) -> KernelSample:
    """Filters of 3 x 3 from as many channels to as many, forward and backward."""
    shape = (_IMAGES, channels, _PIXELS, _PIXELS)
    images = torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_()
    filters = torch.randn(channels, channels, 3, 3, device=stopwatch.device).to(dtype).requires_grad_()

    def run() -> Sequence[Tensor]:
        out = F.conv2d(images, filters, padding=1)
        return torch.autograd.grad(out, (images, filters), torch.ones_like(out))

    flops = 3 * 2 * 9 * channels * images.numel()
    size_bytes = (6 * images.numel() + 3 * filters.numel()) * dtype.itemsize
    return KernelSample(
        work="convolution",
        dtype=name_of(dtype),
        size_bytes=size_bytes,
        flops=flops,
        time_us=stopwatch.time_us(run),
    )


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
