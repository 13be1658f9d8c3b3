"""``PeakMemoryMonitor``: the memory that training steps need at their peak."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_autoparallel.callbacks.tables import make_table, print_table
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer
from lightning_autoparallel.torch_compat.freed_memory import trim_freed_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """A peak that can be read, and what it is the peak of."""

    label: str
    reset: Callable[[], object]
    peak_bytes: Callable[[], int]


def memory_probe(device: torch.device) -> MemoryProbe:
    """The most exact peak that ``device`` and the operating system give."""
    if device.type == "cuda":
        return MemoryProbe(
            label="allocator peak per step",
            reset=lambda: torch.cuda.reset_peak_memory_stats(device),
            peak_bytes=lambda: torch.cuda.max_memory_allocated(device),
        )
    try:
        _reset_process_peak()
        _process_peak_bytes()
    except (OSError, LookupError):
        return MemoryProbe(label="process peak since start", reset=lambda: None, peak_bytes=peak_bytes_since_start)
    return MemoryProbe(label="process peak per step", reset=_reset_process_peak, peak_bytes=_process_peak_bytes)


class PeakMemoryMonitor(Callback):
    """Logs ``autoparallel/peak_memory_bytes``: the largest peak of the steps since the last log, of all ranks.

    Where there is a prediction, ``autoparallel/predicted_peak_memory_bytes`` is logged beside it. It counts what the
    step's graphs keep alive, but neither parameter shards nor optimizer state, which a measured peak has besides.

    Works with any strategy. After the first epoch of a fit, rank 0 prints the epoch's peak, labelled with how it was
    measured, beside the predicted one where there is one. It resets the peak counter at the start of every step: CUDA's
    allocator statistics, or Linux's ``VmHWM`` of the process (which includes Python and libraries). The latter takes
    what is free from the process, which asks for it again: steps on a CPU are slower while they are measured.
    """

    def __init__(self) -> None:
        self._probe: MemoryProbe | None = None
        self._unlogged_bytes = 0
        self._epoch_bytes = 0
        self._printed = False

    @property
    def label(self) -> str | None:
        """How peaks are measured; None before ``setup``."""
        return self._probe.label if self._probe else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose how to measure on this process's device."""
        self._probe = memory_probe(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew for every fit."""
        self._unlogged_bytes = self._epoch_bytes = 0
        self._printed = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget the peak before this step."""
        assert self._probe is not None
        self._probe.reset()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the peak; where the Trainer logs, compare it over ranks and log it."""
        assert self._probe is not None
        peak_bytes = self._probe.peak_bytes()
        self._epoch_bytes = max(self._epoch_bytes, peak_bytes)
        self._unlogged_bytes = max(self._unlogged_bytes, peak_bytes)
        if trainer._logger_connector.should_update_logs:
            # float32, Lightning's choice for a plain number, has too few digits for bytes
            value = torch.tensor(_max_over_ranks(self._unlogged_bytes, trainer), dtype=torch.float64)
            pl_module.log("autoparallel/peak_memory_bytes", value, on_step=True, on_epoch=False, batch_size=1)
            predicted_bytes = _predicted_bytes(trainer.strategy)
            if predicted_bytes is not None:
                value = torch.tensor(predicted_bytes, dtype=torch.float64)
                name = "autoparallel/predicted_peak_memory_bytes"
                pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
            self._unlogged_bytes = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table, once per fit."""
        if self._printed:
            return
        self._printed = True
        peak_bytes = _max_over_ranks(self._epoch_bytes, trainer)
        if not trainer.is_global_zero:
            return
        predicted_bytes = _predicted_bytes(trainer.strategy)
        caption = None if predicted_bytes is None else "predicted: all alive but parameter shards and optimizer state"
        table = make_table("Peak memory of training steps, largest of all ranks", ("",), ("peak",), caption=caption)
        table.add_row(f"measured: {self.label}", format_bytes(peak_bytes))
        if predicted_bytes is not None:
            table.add_row("predicted", format_bytes(predicted_bytes))
        print_table(table)


def _predicted_bytes(strategy: object) -> int | None:
    reports: Mapping[str, PlanReport] = getattr(strategy, "reports", {})
    report = reports.get("training_step")
    return report.predicted_peak_bytes if report else None


def _max_over_ranks(size_bytes: int, trainer: Trainer) -> int:
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return size_bytes
    largest = torch.tensor(size_bytes, dtype=torch.int64, device=trainer.strategy.root_device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def _reset_process_peak() -> None:
    trim_freed_memory()
    _CLEAR_REFS.write_text("5")


def _process_peak_bytes() -> int:
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


def peak_bytes_since_start() -> int:
    """The most physical memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
