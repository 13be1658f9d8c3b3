"""Torch's own overlap scheduler beside this package's, on the same graphs and with the same costs.

    python -m tests.benchmarks.torch_scheduler [--world-size 64 --strategy.mesh '{dp_shard: 64}' ...]

Takes the split graphs that `plan` makes of LLaMA-3 8B (2 sequences of 8192 per data-parallel rank, h100) for
`{dp_shard: 64}` fsdp, `{dp_shard: 16, tp: 8}` with rules and `{dp_replicate: 64}` ddp, or for the
arguments given. `neither` is the order of `prefetch_gathers` and `sink_waits` alone, from which all others start,
`buckets` the same with `bucket_collectives`. Torch's `schedule_overlap_bucketing` (2.13) runs with this package's costs
as its `custom_runtime_estimation` and `max_compute_prefetch=50`, its bucketing off and on, on graphs without and with
this package's buckets; with its default limit of memory (1 GB or 5 % more, whichever is more), and with that of
`schedule_overlap` (128 MiB more). All are judged by this package's timeline and memory prediction: nothing but the
seconds is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.plans import by_rules
from tests.support.split_graphs import HalfFigures, SplitStep, with_split_step
from tests.support.stock_overlap import schedule_as_torch

RECIPE = (*by_rules("llama3/8b"), "--data.init_args.batch_size", "2", "--hardware", "h100")
CASES = (
    ("--world-size", "64", "--strategy.mesh", "{dp_shard: 64}", "--strategy.plan", "fsdp"),
    ("--world-size", "128", "--strategy.mesh", "{dp_shard: 16, tp: 8}"),
    ("--world-size", "64", "--strategy.mesh", "{dp_replicate: 64}", "--strategy.plan", "ddp"),
)
START = ("fuse_chained_all_gathers", "prefetch_gathers", "sink_waits")
ORDER = ("schedule_overlap", "cap_compute_runs")
BUCKETS = ("bucket_collectives",)
OURS = "this package: buckets and order"
LIMITS: Mapping[str, tuple[float | None, float | None]] = {"128 MiB": (0.125, None), "its default": (1.0, 0.05)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is predicted of one order of both graphs, and the seconds of CPU that finding it took."""

    name: str
    halves: Mapping[str, HalfFigures]
    seconds: float

    @property
    def time_us(self) -> float:
        """Of the step, forward and backward."""
        return sum(half.time_us for half in self.halves.values())

    @property
    def exposed_us(self) -> float:
        """Of the step, forward and backward."""
        return sum(half.exposed_us for half in self.halves.values())

    @property
    def peak_bytes(self) -> int:
        """The larger peak."""
        return max(half.peak_bytes for half in self.halves.values())


def compare(step: SplitStep) -> list[Row]:
    """All contenders on one step."""
    starts = {"": START, " on our buckets": (*START, *BUCKETS)}
    rows = [
        _row("neither", step, lambda copy: copy.run(START)),
        _row("buckets", step, lambda copy: copy.run((*START, *BUCKETS))),
        _row("this package: order", step, lambda copy: copy.run((*START, *ORDER))),
        _row(OURS, step, lambda copy: copy.run((*START, *BUCKETS, *ORDER))),
    ]
    for where, passes in starts.items():
        start = step.copied().run(passes)
        for bucketing in (False, True):
            for limit, (increase_gb, ratio) in LIMITS.items():

                def run(copy: SplitStep, bucketing=bucketing, increase_gb=increase_gb, ratio=ratio) -> object:
                    return [
                        schedule_as_torch(half, copy.costs, bucketing=bucketing, increase_gb=increase_gb, ratio=ratio)
                        for half in copy.halves().values()
                    ]

                what = "order and buckets" if bucketing else "order"
                rows.append(_row(f"torch: {what}{where}, {limit}", start, run))
    return rows


def _row(name: str, step: SplitStep, run: Callable[[SplitStep], object]) -> Row:
    copy = step.copied()
    start = time.process_time()
    run(copy)
    row = Row(name=name, seconds=time.process_time() - start, halves=copy.figures())
    print(_line(row), flush=True)
    return row


def _line(row: Row) -> str:
    halves = "  ".join(
        f"{half.time_us / 1e3:9.2f} {half.exposed_us / 1e3:8.2f} {half.peak_bytes / 2**30:7.2f} "
        f"{'/'.join(str(half.launches.get(kind, 0)) for kind in ('all_gather', 'reduce_scatter', 'all_reduce')):>11}"
        for half in row.halves.values()
    )
    return f"{row.name:52} {row.time_us / 1e3:9.2f} {row.exposed_us / 1e3:8.2f}  {halves}  {row.seconds:7.1f}"


def _verdict(rows: list[Row]) -> None:
    """This package against the best of torch's orders that need no more memory, in either half, than is allowed."""
    (ours,) = (row for row in rows if row.name == OURS)
    neither = rows[0]
    for name, half in ours.halves.items():
        more = half.peak_bytes - neither.halves[name].peak_bytes
        print(f"{name}: buckets and order together add {more / 2**30:+.2f} GiB to the predicted peak of neither")
    of_torch = [row for row in rows if row.name.startswith("torch")]
    fair = [row for row in of_torch if row.peak_bytes <= max(ours.peak_bytes, neither.peak_bytes + 2**27)]
    for what, found in (("at no more memory", fair), ("at any memory", of_torch)):
        if not found:
            print(f"{what}: none of torch's")
            continue
        best = min(found, key=lambda row: row.time_us)
        print(
            f"{what}: torch's best is '{best.name}': step {best.time_us / ours.time_us:.4f} of ours, exposed "
            f"{best.exposed_us / 1e3:.2f} to {ours.exposed_us / 1e3:.2f} ms, peak {best.peak_bytes / 2**30:.2f} to "
            f"{ours.peak_bytes / 2**30:.2f} GiB"
        )


def _show(arguments: tuple[str, ...]) -> None:
    print(f"\n{' '.join(arguments)}\n")
    columns = f"{'ms':>9} {'exposed':>8} {'GiB':>7} {'ag/rs/ar':>11}"
    print(f"{'':52} {'step ms':>9} {'exposed':>8}  {'forward ':->38}  {'backward ':->38}  {'CPU s':>7}")
    print(f"{'':52} {'':>9} {'':>8}  {columns}  {columns}")
    with_split_step(arguments, lambda step: _verdict(compare(step)))


if __name__ == "__main__":
    for case in [tuple(sys.argv[1:])] if len(sys.argv) > 1 else CASES:
        _show((*RECIPE, *case))
