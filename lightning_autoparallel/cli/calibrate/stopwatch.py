"""Times of something that all ranks do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_MOST = 500
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
        repeats = self._repeats(run, self.spent_s / _MEANS)
        return statistics.median(self._mean_us(run, repeats) for _ in range(_MEANS))

    def mean_us(self, run: Callable[[], object]) -> float:
        """Microseconds of ``run``, repeated in a row for ``spent_s``: at most 500 times, once where that takes longer.

        It is done once before, to see how long it takes.

        The mean, as a step is a sum: what comes late now and then, or shares its processor with another rank, adds to
        it. Ranks are not brought into step before each repetition, so that what they wait for each other counts. All
        ranks must call it alike.
        """
        return self._mean_us(run, self._repeats(run, self.spent_s))

    def _repeats(self, run: Callable[[], object], spent_s: float) -> int:
        once_us = self._mean_us(run, 1)
        return min(_MOST, max(1, round(1e6 * spent_s / max(once_us, 1.0))))

    def _mean_us(self, run: Callable[[], object], repeats: int) -> float:
        self.finish()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self.finish()
        return self.slowest((time.perf_counter() - start) * 1e6 / repeats)

    def finish(self) -> None:
        """Wait for what the device does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, own_us: float) -> float:
        """The longest of all ranks' times."""
        figure = torch.tensor(own_us, dtype=torch.float64, device=self.device)
        dist.all_reduce(figure, dist.ReduceOp.MAX)
        return float(figure)
