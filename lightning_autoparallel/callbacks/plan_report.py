"""``PlanReportCallback``: what was planned, as files beside the logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.table import Table

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.callbacks.kinds import blocks_table, kinds_table
from lightning_autoparallel.callbacks.predictions import largest_table, passes_table, predicted_lines, times_table
from lightning_autoparallel.callbacks.tables import collective_rows, make_table, render_table
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer


class ReportingStrategy(Protocol):
    """What the callbacks read from AutoParallelStrategy."""

    @property
    def reports(self) -> Mapping[str, PlanReport]:
        """The last report of each step by its name, such as ``training_step``."""

    @property
    def measured_launches(self) -> Mapping[str, int]:
        """Collectives that the last training step launched, by mesh axes; empty before the first one."""

    @property
    def predicted_launches(self) -> Mapping[str, int]:
        """Collectives in the final graphs of the training step that ran last, by mesh axes; empty before the first."""

    @property
    def process_group_backend(self) -> str | None:
        """``nccl``, ``gloo`` or one per device type."""

    @property
    def root_device(self) -> torch.device:
        """This process's device."""


def reporting_strategy(trainer: Trainer, callback: Callback) -> ReportingStrategy:
    """The trainer's strategy, if it has reports.

    Raises:
        ConfigError: it has none; the message names the callback.
    """
    strategy = trainer.strategy
    # Asked of the class first: before its setup, a strategy's property may have nothing to return yet.
    if hasattr(type(strategy), "reports") or hasattr(strategy, "reports"):
        return cast(ReportingStrategy, strategy)
    name = type(callback).__name__
    raise ConfigError(
        f"{name} reads the reports of AutoParallelStrategy, but the Trainer's strategy is {type(strategy).__name__}; "
        f"use AutoParallelStrategy or remove {name} (PeakMemoryMonitor works with any strategy)"
    )


class PlanReportCallback(Callback):
    """Writes each captured step's report below the log directory, on rank 0, as soon as the step was captured.

    The files are ``autoparallel/<step>.report.json``, with the keys that ``lightning-autoparallel plan`` writes, and
    ``<step>.report.txt``, for reading.

    Raises:
        ConfigError: in ``setup``, if the strategy is not an AutoParallelStrategy.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._written: dict[str, PlanReport] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the directory: all ranks together, because they agree on it by a broadcast."""
        reporting_strategy(trainer, self)
        self._directory = Path(trainer.log_dir or trainer.default_root_dir) / "autoparallel"
        self._written = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what the strategy captured for the first step."""
        if batch_idx == 0:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was captured since."""
        self._write(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was captured since."""
        self._write(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was captured since."""
        self._write(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was captured since."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        writer = ArtifactWriter(self._directory if trainer.is_global_zero else None)
        for name, report in reporting_strategy(trainer, self).reports.items():
            if self._written.get(name) is not report:
                self._written[name] = report
                writer.record(f"{name}.report", report.as_json())
                writer.text(f"{name}.report.txt", format_report(report))


def format_report(report: PlanReport) -> str:
    """A report as text: the plan, its sizes, collectives (predicted) and passes."""
    peak = report.predicted_peak_bytes
    facts: dict[str, Any] = {
        "plan": report.plan,
        "mesh": ", ".join(f"{axis}={size}" for axis, size in report.mesh.items()),
        "parameters on one rank": format_bytes(report.parameters_bytes),
        "gradients on one rank": format_bytes(report.gradients_bytes),
        "saved for backward on one rank": format_bytes(report.saved_bytes),
        "peak memory (predicted)": "not predicted" if peak is None else format_bytes(peak),
        "time": ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report.timings_s.items()),
    }
    width = max(len(name) for name in facts)
    lines = [report.graph, "", *(f"{name:<{width}}  {value}" for name, value in facts.items()), ""]
    notes = [f"{done.name}: {note}" for done in report.passes for note in done.notes]
    rendered = [render_table(table) + "\n" for table in report_tables(report)]
    return "\n".join([*lines, *rendered, *predicted_lines(report), *notes, *report.notes]) + "\n"


def report_tables(report: PlanReport) -> list[Table]:
    """All tables of a report, in the order in which they are shown; none of blocks where no launch is of one."""
    blocks = blocks_table(report)
    of_blocks = [blocks] if blocks.row_count else []
    tables = [collectives_table(report), *of_blocks, kinds_table(report), passes_table(report)]
    return tables + ([largest_table(report), times_table(report)] if report.predictions else [])


def collectives_table(report: PlanReport) -> Table:
    """Launches and bytes of one step by graph, kind and mesh axes."""
    title = "Collectives of one step on one rank, counted in the final graphs (predicted)"
    table = make_table(title, ("graph", "kind", "axes"), ("launches", "size"))
    for graph, kind, axes, counted in collective_rows(report):
        table.add_row(graph, kind, axes, str(counted.count), format_bytes(counted.size_bytes))
    return table
