"""The callback that measures one rank; it launches nothing, and waits for the device at the first and last batch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.callbacks.peak_memory import MemoryProbe, memory_probe
from lightning_autoparallel.cli.bench.measurements import RankResult
from lightning_autoparallel.cli.bench.same_graphs import graphs_digest
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer
from lightning_autoparallel.torch_compat.default_world import all_launched_collectives

_CPU = torch.device("cpu")
_COUNTERS = Path("/proc/net/dev")  # of the network namespace that reads it
_SENT = 8  # the column of bytes sent, after the interface's name


def process_memory_bytes() -> int:
    """What this process holds now: its resident set, or the largest it ever was where that is all that is known."""
    probe = memory_probe(_CPU)
    probe.reset()
    return probe.peak_bytes()


def sent_bytes(interface: str | None, counters: str) -> int | None:
    """Bytes that ``interface`` has sent since it is there, as Linux's ``counters`` say; None if they do not have it."""
    rows = {name.strip(): row.split() for name, _, row in (line.partition(":") for line in counters.splitlines())}
    row = rows.get(str(interface))
    return int(row[_SENT]) if row else None


def _sent_bytes_now() -> int | None:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return sent_bytes(interface, _COUNTERS.read_text()) if interface and _COUNTERS.is_file() else None


class BenchClock(Callback):
    """Times ``steps`` batches after ``warmup`` others, from start to start, then one more, and ends the fit.

    A batch's start is a point in time on a CPU, and an event in the device's stream on CUDA, so that a host that runs
    ahead of its device is not measured instead of it.

    Args:
        warmup: batches that are left out.
        steps: batches that are timed.
        before_bytes: the process's memory before the model was built.
    """

    def __init__(self, warmup: int, steps: int, before_bytes: int) -> None:
        self._warmup, self._steps, self._before_bytes = warmup, steps, before_bytes
        self._probe: MemoryProbe | None = None
        self._fit_s = self._startup_s = 0.0
        self._starts: list[Any] = []
        self._launched: list[int] = []
        self._sent: list[int | None] = []
        self._cpu_s: list[float] = []
        self._losses: list[Tensor] = []
        self._peak_bytes = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The fit begins: what follows is the start-up, until the first batch is done."""
        self._fit_s = time.perf_counter()
        self._probe = memory_probe(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark the time and the launches so far; the peak is that of the timed batches."""
        assert self._probe is not None
        if len(self._starts) == self._warmup:
            self._probe.reset()
        if len(self._starts) == self._warmup + self._steps:
            self._peak_bytes = self._probe.peak_bytes()
        self._launched.append(all_launched_collectives())
        self._sent.append(_sent_bytes_now())
        self._cpu_s.append(time.process_time())
        self._starts.append(_mark(trainer.strategy.root_device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss; end the start-up after the first batch and the fit after the last."""
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            self._losses.append(outputs["loss"].detach().clone())
        if len(self._starts) == 1:
            _finish_work(trainer.strategy.root_device)
            self._startup_s = time.perf_counter() - self._fit_s
        if len(self._starts) > self._warmup + self._steps:
            trainer.should_stop = True

    def result(self, trainer: Trainer, report: PlanReport | None) -> RankResult:
        """What was measured, after the fit, and what the report of the step says of it.

        Raises:
            ConfigError: the fit ended early.
        """
        device = trainer.strategy.root_device
        needed = self._warmup + self._steps + 1
        if len(self._starts) < needed:
            raise ConfigError(
                f"training ended after {len(self._starts)} batches, but --warmup and --steps need {needed}: lower them "
                "or raise --trainer.max_epochs or --trainer.limit_train_batches"
            )
        _finish_work(device)
        timed = slice(self._warmup, needed)
        starts, launched = self._starts[timed], self._launched[timed]
        on_cpu = device.type != "cuda"
        return RankResult(
            step_ms=[_elapsed_ms(*pair) for pair in pairwise(starts)],
            launches=[after - before for before, after in pairwise(launched)],
            losses=[float(loss) for loss in self._losses],
            peak_bytes=max(0, self._peak_bytes - self._before_bytes) if on_cpu else self._peak_bytes,
            memory_label="process peak above what it held before the model" if on_cpu else "allocator peak",
            startup_s=self._startup_s,
            compile_s=report.timings_s.get("compile") if report else None,
            planned_launches=sum(report.launches().values()) if report else None,
            accumulated=trainer.accumulate_grad_batches,
            device="cpu" if on_cpu else torch.cuda.get_device_name(device),
            backend=dist.get_backend() if dist.is_initialized() else "none",
            sent_bytes=_per_batch(self._sent[timed]),
            predicted_ms=None if report is None or report.whole_step_us is None else report.whole_step_us / 1e3,
            graphs=None if report is None else graphs_digest(report),
            cpu_ms=(self._cpu_s[timed][-1] - self._cpu_s[timed][0]) * 1e3 / self._steps,
        )


def _per_batch(sent: Sequence[int | None]) -> float | None:
    first, last = sent[0], sent[-1]
    return None if first is None or last is None else (last - first) / (len(sent) - 1)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def _finish_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
