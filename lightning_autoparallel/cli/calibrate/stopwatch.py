"""Times of something that all ranks do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_FEWEST, _MOST = 3, 500
_MEANS = 3


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Measures on ``device``; ranks of the process group begin together, and the slowest one counts."""

    device: torch.device
    spent_s: float = 0.25  # on one figure

    def time_us(self, run: Callable[[], object]) -> float:
        """Microseconds of ``run``: the median of a few means, so that what disturbs for a while disturbs one of them.

        All ranks must call it alike, as ``run`` may talk to others.
        """
        run()
        return statistics.median(self.mean_us(run, self.spent_s / _MEANS) for _ in range(_MEANS))

    def mean_us(self, run: Callable[[], object], spent_s: float | None = None) -> float:
        """Microseconds of ``run``, repeated in a row for ``spent_s``, the stopwatch's unless given.

        The mean, as a step is a sum: what comes late now and then, or shares its processor with another rank, adds to
        it. Ranks are not brought into step before each repetition, so that what they wait for each other counts. All
        ranks must call it alike.
        """
        once_us = self.slowest(self._once_us(run))
        spent_us = 1e6 * (self.spent_s if spent_s is None else spent_s)
        repeats = min(_MOST, max(_FEWEST, int(spent_us / max(once_us, 1.0))))
        self.finish()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self.finish()
        return self.slowest((time.perf_counter() - start) * 1e6 / repeats)

    def _once_us(self, run: Callable[[], object]) -> float:
        self.finish()
        dist.barrier()
        start = time.perf_counter()
        run()
        self.finish()
        return (time.perf_counter() - start) * 1e6

    def finish(self) -> None:
        """Wait for what the device does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, own_us: float) -> float:
        """The longest of all ranks' times."""
        figure = torch.tensor(own_us, dtype=torch.float64, device=self.device)
        dist.all_reduce(figure, dist.ReduceOp.MAX)
        return float(figure)
