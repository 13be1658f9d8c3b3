"""Collectives of each kind, as graphs start them, timed over each axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_autoparallel.cli.calibrate.samples import CollectiveSample
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost import GroupShape
from lightning_autoparallel.cost.links import COLLECTIVES
from lightning_autoparallel.torch_compat import collectives as c
from lightning_autoparallel.torch_compat.rank_operators import SHARD_PERMUTE

_CPU_SIZES, _GPU_SIZES = range(12, 25, 3), range(14, 30, 3)  # powers of two, in bytes
_LAUNCHES = 50
_OVERLAPS = 5
_SUM = "sum"
_BETWEEN_US = 1000.0  # of computing before a collective
_SHORTEST_US = 1.0


def collective_samples(stopwatch: Stopwatch, axis: PlanAxis, group: GroupShape) -> Iterator[CollectiveSample]:
    """One sample after the other; all ranks of ``axis`` must take them together.

    Each is what it adds to some computing before it: a rank that is late, or a thread that is woken up late, is waited
    for in a step too.
    """
    compute = _computing(stopwatch, _BETWEEN_US)
    for kind in COLLECTIVES:
        for power in _CPU_SIZES if stopwatch.device.type == "cpu" else _GPU_SIZES:
            run, size_bytes = _collective(kind, 2**power, axis, stopwatch.device)
            yield CollectiveSample(
                kind=kind,
                axes=axis.name,
                group=group,
                size_bytes=size_bytes,
                time_us=max(_SHORTEST_US, stopwatch.added_us(lambda run=run: c.WAIT(run()), compute)),  # type: ignore[misc]
            )


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


def overlap_times(stopwatch: Stopwatch, axis: PlanAxis, size_bytes: int) -> Sequence[tuple[float, float, float]]:
    """Microseconds of an all-reduce alone, of computing that takes longer alone, and of both at once."""
    start, _ = _collective("all_reduce", size_bytes, axis, stopwatch.device)
    alone_us = max(_SHORTEST_US, stopwatch.added_us(lambda: c.WAIT(start()), _computing(stopwatch, _BETWEEN_US)))
    compute = _computing(stopwatch, 2 * alone_us)

    def both() -> None:
        result = start()
        compute()
        c.WAIT(result)

    def nothing() -> None:
        """What is added to it is all of it."""

    return [
        (alone_us, stopwatch.added_us(compute, nothing), stopwatch.added_us(both, nothing)) for _ in range(_OVERLAPS)
    ]


def _computing(stopwatch: Stopwatch, time_us: float) -> Callable[[], None]:
    """Matrix products that take about so long."""
    left = torch.randn(256, 256, device=stopwatch.device)
    count = max(1, round(time_us / stopwatch.time_us(lambda: left @ left)))

    def compute() -> None:
        for _ in range(count):
            left @ left

    return compute
