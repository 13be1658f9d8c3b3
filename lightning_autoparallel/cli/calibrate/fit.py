"""Few numbers from many samples; the forms are those in which the cost model uses them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lightning_autoparallel.cli.calibrate.samples import CollectiveSample, KernelSample, OverlapSample, StepSample
from lightning_autoparallel.cost.collective import hops, moved_share

Row = tuple[float, float, float]  # (x, y, t) of t = a * x + b * y

_TINY = 1e-9
_TOLD, _UNTOLD_PACE = 0.05, 0.5
_OF_LONGEST = 0.3  # what FLOPs have to explain of the longest sample's time, for it to tell their rate
_SLOWEST = 0.1  # a collective beside computing: none was seen to stand still
_REWEIGHTED = 5
_LEAST_WEIGHED = 0.1  # of what was measured: what a row is fitted to may be next to nothing
_OF_LATENCY = 3.0  # a kernel that takes so many times the shortest one tells of a rate


def kernel_latency_us(samples: Sequence[KernelSample]) -> float:
    """The shortest time of any kernel."""
    return min(sample.time_us for sample in samples)


def memory_gb_per_s(samples: Sequence[KernelSample], latency_us: float) -> float:
    """The rate that is least wrong, relatively, for kernels that only move bytes: their median.

    Kernels that take hardly longer than the shortest one are left out, unless there are no others.
    """
    return _median_rate([(sample.size_bytes, sample.time_us) for sample in samples], latency_us) / 1e3


def tflops(samples: Sequence[KernelSample], latency_us: float) -> float:
    """The same for kernels that compute: 1e12 FLOPs per second."""
    return _median_rate([(sample.flops, sample.time_us) for sample in samples], latency_us) / 1e6


def operand_rates(samples: Sequence[KernelSample], latency_us: float) -> tuple[float, float | None]:
    """(TFLOP/s, GB/s) of attention or convolutions of one dtype: both what is computed and what is touched take time.

    The two are those of least squares of relative errors. The second is None where FLOPs alone explain the times; where
    they explain too little of the longest one to tell their rate, all of the time is put down to them.
    """
    telling = [sample for sample in samples if sample.time_us > _OF_LATENCY * latency_us]
    rows = [(sample.size_bytes, sample.flops, sample.time_us) for sample in telling]
    per_byte_us, per_flop_us = least_relative_squares(rows) if len(rows) > 1 else (0.0, 0.0)
    longest_us = max((time_us for *_, time_us in rows), default=0.0)
    by_bytes = any(per_byte_us * size_bytes > _TOLD * time_us for size_bytes, _, time_us in rows)
    by_flops = any(per_flop_us * flops > _OF_LONGEST * time_us for _, flops, time_us in rows if time_us == longest_us)
    if not (by_bytes and by_flops):
        return tflops(samples, latency_us), None
    return 1e-6 / per_flop_us, 1e-3 / per_byte_us


def _median_rate(pairs: Sequence[tuple[int, float]], latency_us: float) -> float:
    telling = [(amount, time_us) for amount, time_us in pairs if time_us > _OF_LATENCY * latency_us]
    return statistics.median(amount / time_us for amount, time_us in telling or pairs)


def link_rates(samples: Sequence[CollectiveSample], launch_us: float) -> tuple[float, float]:
    """(GB/s, latency in us of a hop) of one kind of collective, all its samples of groups of one sort of link.

    A sample's time is ``launch + hops * latency + moved / bandwidth``, as ``cost.collective`` has it. The two numbers
    are those of least squares of relative errors, neither below 0.
    """
    latency_us, us_per_byte = least_relative_squares([_row(sample, launch_us) for sample in samples])
    return 1e-3 / max(us_per_byte, _TINY), latency_us


def _row(sample: CollectiveSample, launch_us: float) -> tuple[float, float, float]:
    """Hops, bytes through the narrowest link of a rank, and microseconds."""
    group = sample.group
    inside, between = hops(sample.kind, group)
    adapters = 1 if group.nodes == 1 or sample.kind in ("permute", "all_to_all") else group.ranks_per_node
    moved = _moved(sample) * sample.size_bytes / adapters
    return inside + between, moved, max(sample.time_us - launch_us, _TINY)


def _moved(sample: CollectiveSample) -> float:
    if sample.kind == "all_to_all" and sample.group.nodes > 1:
        return (sample.group.ranks - sample.group.ranks_per_node) / sample.group.ranks
    return moved_share(sample.kind, sample.group.ranks)


def least_relative_squares(rows: Sequence[Row]) -> tuple[float, float]:
    """The ``(a, b)``, 0 or more, that are least wrong for rows ``(x, y, t)`` of ``t = a * x + b * y``, relatively.

    Errors are taken relative to what is fitted, by reweighting: relative to what was measured, rows that came out
    short by chance would count more than those that came out long.
    """
    a, b = _least_squares(rows, [t for *_, t in rows])
    for _ in range(_REWEIGHTED):
        a, b = _least_squares(rows, [max(a * x + b * y, _LEAST_WEIGHED * t) for x, y, t in rows])
    return a, b


def _least_squares(rows: Sequence[Row], units: Sequence[float]) -> tuple[float, float]:
    """The ``(a, b)``, 0 or more, with the least sum of ``((a * x + b * y - t) / unit) ** 2``."""
    scaled = [(x / unit, y / unit, t / unit) for (x, y, t), unit in zip(rows, units, strict=True)]
    xx, yy = sum(x * x for x, *_ in scaled), sum(y * y for _, y, _ in scaled)
    xy = sum(x * y for x, y, _ in scaled)
    xt, yt = sum(x * t for x, _, t in scaled), sum(y * t for _, y, t in scaled)
    determinant = xx * yy - xy * xy
    if determinant > _TINY * xx * yy:
        a, b = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone_x, alone_y = (xt / xx if xx else 0.0), (yt / yy if yy else 0.0)
    by_x = sum((alone_x * x - t) ** 2 for x, _, t in scaled)
    by_y = sum((alone_y * y - t) ** 2 for _, y, t in scaled)
    return (alone_x, 0.0) if by_x <= by_y else (0.0, alone_y)


def step_rates(samples: Sequence[StepSample]) -> tuple[float, float]:
    """(us of a step, us of each of its parameters) beside the graphs."""
    return least_relative_squares([(1, s.parameters, max(s.time_us - s.graphs_us, _TINY)) for s in samples])


def overlap_share(longer: Sequence[OverlapSample]) -> float:
    """How much of a collective's time is lost by computing beside it: the mean, from 0 to 1.

    Computing goes on for longer than the collective, so that what both take beyond computing alone was lost to it.
    """
    lost = statistics.mean((sample.both_us - sample.computing_us) / sample.communicating_us for sample in longer)
    return min(1.0, max(0.0, lost))


def overlap_pace(shorter: Sequence[OverlapSample], share: float) -> float:
    """At which pace a collective goes on while something computes that ends before it: from ``_SLOWEST`` to 1.

    With times relative to the collective's alone, ``c`` of computing at the pace ``1 - share * pace`` leaves
    ``1 - c * pace / (1 - share * pace)`` of the collective, so that both end after
    ``1 + c * (1 - pace) / (1 - share * pace)``: solved for the pace.
    """
    c = statistics.mean(sample.computing_us / sample.communicating_us for sample in shorter)
    added = statistics.mean(sample.both_us / sample.communicating_us for sample in shorter) - 1
    left = c - added * share
    if left < _TOLD * c:  # one after the other, at any pace: all of the collective's time is lost
        return _UNTOLD_PACE
    return min(1.0, max(_SLOWEST, (c - added) / left))


def causal_share(samples: Sequence[KernelSample], gb_per_s: Mapping[str, float]) -> float:
    """The part of attention's pairs that causal attention takes the time of, from a half to 1: the median.

    Each causal sample has one of the same size and dtype of all pairs, of twice the FLOPs. ``gb_per_s`` is at which
    rate operands add to both; samples of which they explain most tell nothing.
    """
    whole = {(s.dtype, s.size_bytes, s.flops): s for s in samples if not s.is_causal}
    pairs = [(s, whole[s.dtype, s.size_bytes, 2 * s.flops]) for s in samples if s.is_causal]
    times = [(_of_pairs_us(causal, gb_per_s), _of_pairs_us(of_all, gb_per_s), of_all) for causal, of_all in pairs]
    shares = [causal_us / all_us for causal_us, all_us, of_all in times if all_us > 0.5 * of_all.time_us]
    return min(1.0, max(0.5, statistics.median(shares))) if shares else 0.5


def _of_pairs_us(sample: KernelSample, gb_per_s: Mapping[str, float]) -> float:
    rate = gb_per_s.get(sample.dtype)
    return sample.time_us - (0.0 if rate is None else sample.size_bytes / (rate * 1e3))
