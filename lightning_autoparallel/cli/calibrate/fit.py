"""Few numbers from many samples; the forms are those in which the cost model uses them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_autoparallel.cli.calibrate.samples import CollectiveSample, KernelSample, StepSample
from lightning_autoparallel.cost.collective import hops, moved_share

Row = tuple[float, float, float]  # (x, y, t) of t = a * x + b * y

_TINY = 1e-9
_REWEIGHTED = 5
_LEAST_WEIGHED = 0.1  # of what was measured: what a row is fitted to may be next to nothing
_DISTURBED = 1.5  # times as long as others say
_AGREEING = 0.25  # of the squares that were left with it
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


def _median_rate(pairs: Sequence[tuple[int, float]], latency_us: float) -> float:
    telling = [(amount, time_us) for amount, time_us in pairs if time_us > _OF_LATENCY * latency_us]
    return statistics.median(amount / time_us for amount, time_us in telling or pairs)


def link_rates(samples: Sequence[CollectiveSample], launch_us: float) -> tuple[float, float]:
    """(GB/s, latency in us of a hop) of one kind of collective, all its samples of groups of one sort of link.

    A sample's time is ``launch + hops * latency + moved / bandwidth``, as ``cost.collective`` has it. The two numbers
    are those of least squares of relative errors, neither below 0, without one sample that something else disturbed.
    """
    latency_us, us_per_byte = least_relative_squares(undisturbed([_row(sample, launch_us) for sample in samples]))
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


def undisturbed(rows: Sequence[Row]) -> list[Row]:
    """``rows`` without the one that took longer than all others say, if there is one: they agree without it.

    Three rows must be left, of which two cannot agree by chance.
    """
    rows = list(rows)
    if len(rows) < 4:
        return rows
    without = [rows[:i] + rows[i + 1 :] for i in range(len(rows))]
    least = min(range(len(rows)), key=lambda i: _squares(without[i]))
    latency, rate = least_relative_squares(without[least])
    x, y, taken = rows[least]
    agree = _squares(without[least]) < _AGREEING * _squares(rows)
    return without[least] if agree and taken > _DISTURBED * (latency * x + rate * y) else rows


def _squares(rows: Sequence[Row]) -> float:
    a, b = least_relative_squares(rows)
    return sum(((a * x + b * y) / t - 1) ** 2 for x, y, t in rows)


def step_rates(samples: Sequence[StepSample]) -> tuple[float, float]:
    """(us of a step, us of each of its parameters) beside the graphs."""
    return least_relative_squares([(1, s.parameters, max(s.time_us - s.graphs_us, _TINY)) for s in samples])


def overlap_share(samples: Sequence[tuple[float, float, float]]) -> float:
    """How much of a collective's time is lost by computing beside it: the median, from 0 to 1.

    Computing goes on for longer than the collective, so that what both take beyond computing alone was lost to it.
    """
    lost = [(both - computing) / communicating for communicating, computing, both in samples]
    return min(1.0, max(0.0, statistics.median(lost)))
