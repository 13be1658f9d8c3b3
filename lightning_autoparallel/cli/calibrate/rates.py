"""What was measured as ``hardware:`` takes it, and how far each sample is from what is predicted with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_autoparallel.cli.calibrate.fit import (
    causal_share,
    kernel_latency_us,
    link_rates,
    memory_gb_per_s,
    operand_rates,
    overlap_pace,
    overlap_share,
    step_rates,
    tflops,
)
from lightning_autoparallel.cli.calibrate.samples import CollectiveSample, KernelSample, Samples, StepSample
from lightning_autoparallel.cost import HardwareSpec, hardware_named
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.cost.compute import computing_time_us
from lightning_autoparallel.cost.hardware import Work
from lightning_autoparallel.cost.optimizer import ADAMW_MOVES, update_time_us

_DIGITS = 4
_WITH_OPERANDS: tuple[Work, ...] = ("attention", "convolution")


def rates_of(samples: Samples, base: str, name: str, memory_bytes: int, ranks_per_node: int) -> dict[str, Any]:
    """The mapping that ``hardware_from`` takes; figures of links that no group used stay those of ``base``."""
    latency_us = kernel_latency_us(samples.kernels)
    moving, updating, attention = (
        [sample for sample in samples.kernels if sample.work == work] for work in ("memory", "optimizer", "attention")
    )
    products = {dtype: tflops(found, latency_us) for dtype, found in _by_dtype(samples, "product").items()}
    operands = {work: _with_operands(samples, work, latency_us) for work in _WITH_OPERANDS}
    return {
        "base": base,
        "name": name,
        "is_measured": True,
        "backend": hardware_named(base).backend,
        "peak_tflops": {dtype: _short(rate) for dtype, rate in products.items()},
        "matmul_fraction": 1.0,
        **operands["attention"],
        "causal_share": _short(causal_share(attention, operands["attention"]["attention_gb_per_s"])),
        **operands["convolution"],
        "memory_gb_per_s": _short(memory_gb_per_s(moving, latency_us)),
        "memory_fraction": 1.0,
        "optimizer_gb_per_s": _short(memory_gb_per_s(updating, latency_us)),
        "memory_bytes": memory_bytes,
        "kernel_latency_us": _short(latency_us),
        "ranks_per_node": ranks_per_node,
        **_links(samples),
    }


def with_steps(rates: Mapping[str, Any], steps: Sequence[StepSample]) -> dict[str, Any]:
    """The rates with what training steps took beside their graphs."""
    step_us, parameter_us = step_rates(steps)
    return {**rates, "step_latency_us": _short(step_us), "parameter_latency_us": _short(parameter_us)}


def _with_operands(samples: Samples, work: Work, latency_us: float) -> dict[str, dict[str, float]]:
    """TFLOP/s and GB/s by dtype; a dtype whose operands add nothing has none of the second."""
    found = {dtype: operand_rates(of, latency_us) for dtype, of in _by_dtype(samples, work).items()}
    return {
        f"{work}_tflops": {dtype: _short(rate) for dtype, (rate, _) in found.items()},
        f"{work}_gb_per_s": {dtype: _short(rate) for dtype, (_, rate) in found.items() if rate is not None},
    }


def _by_dtype(samples: Samples, work: Work) -> dict[str, list[KernelSample]]:
    """Of attention, what is computed of all pairs."""
    telling = [sample for sample in samples.kernels if sample.work == work and not sample.is_causal]
    dtypes = dict.fromkeys(sample.dtype for sample in telling)
    return {dtype: [sample for sample in telling if sample.dtype == dtype] for dtype in dtypes}


def _links(samples: Samples) -> dict[str, Any]:
    if not samples.collectives:
        return {}
    inside = [sample for sample in samples.collectives if sample.group.nodes == 1]
    between = [sample for sample in samples.collectives if sample.group.nodes > 1]
    by_link = {"intra_node": inside, "inter_node": between}
    links = {key: _link(found, samples.launch_us) for key, found in by_link.items() if found}
    measured = {"launch_latency_us": _short(samples.launch_us), **links}
    return measured | (_overlap(samples) if samples.longer else {})


def _overlap(samples: Samples) -> dict[str, float]:
    share = overlap_share(samples.longer)
    return {"overlap_share": _short(share), "overlap_pace": _short(overlap_pace(samples.shorter, share))}


def _link(samples: Sequence[CollectiveSample], launch_us: float) -> dict[str, Any]:
    """Rates by kind; the link's own are those of all-gathers."""
    kinds = {}
    for kind in dict.fromkeys(sample.kind for sample in samples):
        bandwidth, latency = link_rates([sample for sample in samples if sample.kind == kind], launch_us)
        kinds[kind] = {"bandwidth_gb_per_s": _short(bandwidth), "latency_us": _short(latency)}
    return {**kinds["all_gather"], "kinds": kinds}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def residuals(samples: Samples, hardware: HardwareSpec) -> Iterator[tuple[str, str, float, float]]:
    """(what, how large, measured us, predicted us) of every sample."""
    for kernel in samples.kernels:
        size = f"{kernel.flops / 1e6:.3g} MFLOP" if kernel.flops else f"{kernel.size_bytes} bytes"
        yield f"{kernel.work} {kernel.dtype}", size, kernel.time_us, kernel_time_us(kernel, hardware)
    for sample in samples.collectives:
        predicted_us = collective_time_us(sample.kind, sample.size_bytes, sample.group, hardware)
        yield f"{sample.kind} over {sample.axes}", f"{sample.size_bytes} bytes", sample.time_us, predicted_us
    for step in samples.steps:
        yield "step", f"{step.parameters} parameters", step.time_us, _whole_us(step, hardware)


def _whole_us(step: StepSample, hardware: HardwareSpec) -> float:
    host_us = hardware.host_time_us(step.parameters)
    assert host_us is not None, "steps are samples of hardware whose host was measured"
    return step.graphs_us + host_us


def kernel_time_us(sample: KernelSample, hardware: HardwareSpec) -> float:
    """What the cost model makes of such a kernel."""
    moving_us = sample.size_bytes / (hardware.achieved_gb_per_s * 1e3)
    if sample.work == "memory":
        return max(moving_us, hardware.kernel_latency_us)
    if sample.work == "optimizer":
        return update_time_us(sample.size_bytes / ADAMW_MOVES, hardware)
    dtype = getattr(torch, sample.dtype)
    computing_us = computing_time_us(sample.flops, sample.size_bytes, dtype, sample.work, hardware, sample.is_causal)
    return max(moving_us, computing_us, hardware.kernel_latency_us)


def spread(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(typical, worst) ratio of measured to predicted, whichever is larger on top: median and maximum."""
    ratios = sorted(max(measured / predicted, predicted / measured) for measured, predicted in pairs)
    return ratios[len(ratios) // 2], ratios[-1]
