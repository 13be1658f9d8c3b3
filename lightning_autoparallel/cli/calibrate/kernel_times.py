"""Kernels of the kinds that steps are made of, timed on one device."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from lightning_autoparallel.cli.calibrate.samples import KernelSample
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.cost.optimizer import ADAMW_MOVES

_Shape = tuple[int, int, int, int]
_ROUNDS = 3
_MOST_COLD = 256
_UPDATED = 16


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """How large kernels are: a step's own sizes, at which computing and not starting them is what takes time."""

    powers: range  # of two, bytes of a sum
    cold: int  # bytes that no cache holds
    updated: int  # elements of a parameter
    widths: Sequence[int]  # of products
    lengths: Sequence[int]  # of attention
    heads: int
    head_width: int
    channels: Sequence[int]  # of convolutions
    images: int
    pixels: int


_CPU = _Sizes(
    powers=range(12, 25, 3),
    cold=2**27,
    updated=2**20,
    widths=(64, 128, 256, 512),
    lengths=(64, 128, 256, 512),
    heads=4,
    head_width=64,
    channels=(16, 32, 64),
    images=8,
    pixels=32,
)
_GPU = _Sizes(
    powers=range(16, 31, 3),
    cold=2**30,
    updated=2**24,
    widths=(512, 1024, 2048, 4096, 8192),
    lengths=(1024, 2048, 4096),
    heads=16,
    head_width=128,
    channels=(64, 128, 256),
    images=64,
    pixels=56,
)


def kernel_samples(stopwatch: Stopwatch, dtypes: Sequence[torch.dtype]) -> list[KernelSample]:
    """Adding tensors, updating parameters, products, attention, convolutions: each the median of a few rounds.

    What disturbs for a while disturbs one of the rounds.
    """
    hurried = replace(stopwatch, spent_s=stopwatch.spent_s / _ROUNDS)
    rounds = [list(_round(hurried, dtypes)) for _ in range(_ROUNDS)]
    return [
        replace(same[0], time_us=statistics.median(sample.time_us for sample in same))
        for same in zip(*rounds, strict=True)
    ]


def _round(stopwatch: Stopwatch, dtypes: Sequence[torch.dtype]) -> Iterator[KernelSample]:
    sizes = _CPU if stopwatch.device.type == "cpu" else _GPU
    for power in sizes.powers:
        yield _sum(stopwatch, 2**power, sizes.cold)
    yield _update(stopwatch, sizes.updated)
    for dtype in dtypes:
        for width in sizes.widths:
            yield _products(stopwatch, width, dtype, sizes.cold)
        for length in sizes.lengths:
            wide, narrow = ((2, sizes.heads, length, width) for width in (sizes.head_width, sizes.head_width // 2))
            yield _attention(stopwatch, narrow, dtype, is_causal=False)
            yield _attention(stopwatch, wide, dtype, is_causal=False)
            yield _attention(stopwatch, wide, dtype, is_causal=True)
        for channels in sizes.channels:
            yield _convolution(stopwatch, (sizes.images, channels, sizes.pixels, sizes.pixels), dtype)


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
    return KernelSample(work="memory", dtype="float32", size_bytes=size_bytes, flops=0, time_us=stopwatch.mean_us(add))


def _update(stopwatch: Stopwatch, count: int) -> KernelSample:
    """AdamW as it steps in a training, over several parameters of ``count`` elements each: all of them at once.

    One after the other, its temporaries would be small enough to be found again in the allocator, now and then.
    """
    parameters = [torch.ones(count, device=stopwatch.device, requires_grad=True) for _ in range(_UPDATED)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    time_us = stopwatch.mean_us(AdamW(parameters, foreach=True).step)
    size_bytes = ADAMW_MOVES * 4 * count * _UPDATED
    return KernelSample(work="optimizer", dtype="float32", size_bytes=size_bytes, flops=0, time_us=time_us)


def _products(stopwatch: Stopwatch, width: int, dtype: torch.dtype, cold_bytes: int) -> KernelSample:
    """A batch of ``4 * width`` rows through a layer of ``width`` by ``width``, and its two products backward.

    Other operands are taken each time: a step reads each weight once, and comes back to it when no cache holds it.
    """
    shapes = ((4 * width, width), (width, width), (4 * width, width))
    first = [torch.randn(shape, device=stopwatch.device).to(dtype) for shape in shapes]
    operand_bytes = sum(operand.nbytes for operand in first)
    count = max(1, min(_MOST_COLD, cold_bytes // operand_bytes))
    turns = itertools.cycle([first, *([operand.clone() for operand in first] for _ in range(count - 1))])

    def run() -> Sequence[Tensor]:
        rows, weight, gradient = next(turns)
        return rows @ weight.T, gradient @ weight, gradient.T @ rows

    flops = 3 * 2 * 4 * width**3
    return KernelSample(
        work="product",
        dtype=name_of(dtype),
        size_bytes=3 * operand_bytes,
        flops=flops,
        time_us=stopwatch.mean_us(run),
    )


def _attention(stopwatch: Stopwatch, shape: _Shape, dtype: torch.dtype, *, is_causal: bool) -> KernelSample:
    """Forward and backward, which compute 2 and 5 products of all pairs, or of half of them.

    ``shape`` is that of queries: batch, heads, length, width of a head.
    """
    query, key, value = (torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.ones_like(query)

    def run() -> Sequence[Tensor]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return torch.autograd.grad(out, (query, key, value), gradient)

    time_us = stopwatch.mean_us(run)
    flops = 7 * 2 * query.numel() * shape[2] // (2 if is_causal else 1)
    size_bytes = 12 * query.numel() * dtype.itemsize
    return KernelSample(
        work="attention",
        dtype=name_of(dtype),
        size_bytes=size_bytes,
        flops=flops,
        time_us=time_us,
        is_causal=is_causal,
    )


def _convolution(stopwatch: Stopwatch, shape: _Shape, dtype: torch.dtype) -> KernelSample:
    """Filters of 3 x 3 from as many channels to as many, forward and backward, of images of a shape."""
    channels = shape[1]
    images = torch.randn(shape, device=stopwatch.device).to(dtype).requires_grad_()
    filters = torch.randn(channels, channels, 3, 3, device=stopwatch.device).to(dtype).requires_grad_()

    gradient = torch.ones_like(images)

    def run() -> Sequence[Tensor]:
        out = F.conv2d(images, filters, padding=1)
        return torch.autograd.grad(out, (images, filters), gradient)

    flops = 3 * 2 * 9 * channels * images.numel()
    size_bytes = (5 * images.numel() + 3 * filters.numel()) * dtype.itemsize
    return KernelSample(
        work="convolution",
        dtype=name_of(dtype),
        size_bytes=size_bytes,
        flops=flops,
        time_us=stopwatch.mean_us(run),
    )


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
