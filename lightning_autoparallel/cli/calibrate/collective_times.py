"""Collectives of each kind, as graphs start them, timed over each axis of a mesh."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_autoparallel.cli.calibrate.samples import CollectiveSample, OverlapSample
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost import GroupShape
from lightning_autoparallel.cost.links import COLLECTIVES
from lightning_autoparallel.torch_compat import collectives as c
from lightning_autoparallel.torch_compat.rank_operators import SHARD_PERMUTE

_CPU_SIZES, _GPU_SIZES = range(12, 25, 4), range(14, 30, 3)  # powers of two, in bytes
_LAUNCHES = 50
_OVERLAPS = 5
_ROUNDS = 3
_SUM = "sum"
_BETWEEN_US = 1000.0  # of computing before a collective
_LONG, _LATE_ROUNDS = 50, 9  # times that, to see what waiting adds, and how often
_TELLING_ROUNDS, _LATEST = 8, 0.5  # by chance, two in a hundred times
_WIDTHS = {"cpu": 256, "cuda": 2048}  # of products that keep the device busy, and not who starts them
_SMALL_BYTES = 4096
_SHORTEST_US = 1.0


def collective_samples(
    stopwatch: Stopwatch, axis: PlanAxis, group: GroupShape, late: float
) -> Iterator[CollectiveSample]:
    """One sample after the other; all ranks of ``axis`` must take them together.

    Each is what it adds to some computing before it, less the ``late`` share of that: a thread that is woken up late is
    waited for in a step too, a rank that computes for longer is counted where it computes.
    """
    compute = _computing(stopwatch, _BETWEEN_US)
    sizes = _CPU_SIZES if stopwatch.device.type == "cpu" else _GPU_SIZES
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):  # what disturbs for a while disturbs one of them
        computing_us = stopwatch.mean_us(compute) * (1 + late)
        for kind, power in itertools.product(COLLECTIVES, sizes):
            run, size_bytes = _collective(kind, 2**power, axis, stopwatch.device)
            taken[kind, size_bytes].append(stopwatch.mean_us(_after(compute, run)) - computing_us)
    for (kind, size_bytes), times_us in taken.items():
        time_us = max(_SHORTEST_US, statistics.median(times_us))
        yield CollectiveSample(kind=kind, axes=axis.name, group=group, size_bytes=size_bytes, time_us=time_us)


def _after(compute: Callable[[], None], start: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        compute()
        c.WAIT(start())

    return run


def _collective(kind: str, size_bytes: int, axis: PlanAxis, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """What starts a collective whose larger side has about so many bytes, and how many it has."""
    rows = max(1, size_bytes // 4 // axis.size)  # of one rank, in float32
    whole, part = torch.ones(rows * axis.size, device=device), torch.ones(rows, device=device)
    even = [rows] * axis.size
    start: Callable[[], Tensor] = {
        "all_gather": lambda: c.ALL_GATHER(part, axis.size, axis.group_name),
        "reduce_scatter": lambda: c.REDUCE_SCATTER(whole, _SUM, axis.size, axis.group_name),
        "all_reduce": lambda: c.ALL_REDUCE(whole, _SUM, axis.group_name),
        "all_to_all": lambda: c.ALL_TO_ALL(whole, even, even, axis.group_name),
        "permute": lambda: SHARD_PERMUTE(whole, 1, axis.group_name),
        "broadcast": lambda: c.BROADCAST(whole, 0, axis.group_name),
    }[kind]
    return start, 4 * whole.numel()


def launch_time_us(axis: PlanAxis, device: torch.device) -> float:
    """The shortest time in which a small collective was started, what it takes after that apart."""
    whole = torch.ones(axis.size, device=device)
    taken = []
    for _ in range(_LAUNCHES):
        start = time.perf_counter()
        result = c.ALL_REDUCE(whole, _SUM, axis.group_name)
        taken.append((time.perf_counter() - start) * 1e6)
        c.WAIT(result)
    return min(taken)


def late_share(stopwatch: Stopwatch, axis: PlanAxis) -> float:
    """What ranks wait for the slowest of them, as a share of what they compute between two collectives.

    It is how much more a small all-reduce adds to long computing than to short computing: the median of some rounds,
    from 0 to ``_LATEST``, and 0 where rounds do not agree that there is anything.
    """
    start, _ = _collective("all_reduce", _SMALL_BYTES, axis, stopwatch.device)
    short, long = _computing(stopwatch, _BETWEEN_US), _computing(stopwatch, _BETWEEN_US * _LONG)
    shares = [_late_share(stopwatch, start, short, long) for _ in range(_LATE_ROUNDS)]
    is_told = sum(share > 0 for share in shares) >= _TELLING_ROUNDS
    return min(_LATEST, statistics.median(shares)) if is_told else 0.0


def _late_share(
    stopwatch: Stopwatch, start: Callable[[], Tensor], short: Callable[[], None], long: Callable[[], None]
) -> float:
    short_us, long_us = stopwatch.mean_us(short), stopwatch.mean_us(long)
    added_us = stopwatch.mean_us(_after(long, start)) - long_us
    before_us = stopwatch.mean_us(_after(short, start)) - short_us
    return (added_us - before_us) / (long_us - short_us)


def overlap_samples(
    stopwatch: Stopwatch, axis: PlanAxis, size_bytes: int, lengths: Sequence[float], late: float
) -> dict[float, list[OverlapSample]]:
    """An all-reduce beside computing that takes so many times as long, some times over, by that length.

    Computing takes the ``late`` share longer before something is waited for, and does so here.
    """
    start, _ = _collective("all_reduce", size_bytes, axis, stopwatch.device)
    between = _computing(stopwatch, _BETWEEN_US)
    before = _after(between, start)
    alone_us = [_added_us(stopwatch, before, between, late) for _ in range(_OVERLAPS)]
    beside = {length: _computing(stopwatch, length * statistics.mean(alone_us)) for length in lengths}
    return {length: [_overlap(stopwatch, start, beside[length], us, late) for us in alone_us] for length in lengths}


def _added_us(stopwatch: Stopwatch, both: Callable[[], None], compute: Callable[[], None], late: float) -> float:
    both_us = stopwatch.mean_us(both)
    return max(_SHORTEST_US, both_us - stopwatch.mean_us(compute) * (1 + late))


def _overlap(
    stopwatch: Stopwatch, start: Callable[[], Tensor], compute: Callable[[], None], alone_us: float, late: float
) -> OverlapSample:
    def both() -> None:
        result = start()
        compute()
        c.WAIT(result)

    return OverlapSample(
        communicating_us=alone_us,
        computing_us=stopwatch.mean_us(compute) * (1 + late),
        both_us=stopwatch.mean_us(both),
    )


def _computing(stopwatch: Stopwatch, time_us: float) -> Callable[[], None]:
    """Matrix products that take about so long."""
    width = _WIDTHS[stopwatch.device.type]
    left = torch.randn(width, width, device=stopwatch.device)
    count = max(1, round(time_us / stopwatch.time_us(lambda: left @ left)))

    def compute() -> None:
        for _ in range(count):
            left @ left

    return compute
