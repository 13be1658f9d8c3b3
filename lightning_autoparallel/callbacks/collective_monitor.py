"""``CollectiveMonitor``: collectives launched by each training step, beside those in its graphs."""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.table import Table

from lightning_autoparallel.callbacks.launches import LaunchHistory, StepLaunches, steps_table
from lightning_autoparallel.callbacks.plan_report import ReportingStrategy, reporting_strategy
from lightning_autoparallel.callbacks.tables import collective_rows, make_table, print_table
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer, rank_zero_warn

_TRAINING_STEP = "training_step"


class CollectiveMonitor(Callback):
    """Logs ``autoparallel/launches/<axes>`` and ``autoparallel/launches/total``: measured launches of a training step.

    Beside them it logs ``autoparallel/predicted_launches/...``: those in the final graphs of the captured variant that
    ran. Axes that are joined are ``dp_replicate-dp_shard`` there: some loggers refuse commas. After the first epoch of
    a fit, rank 0 prints both, step by step. A difference between the two is warned about as soon as it is seen, once
    for every group.

    Args:
        history: how many steps ``launches`` remembers.

    Raises:
        ConfigError: in ``setup``, if the strategy is not an AutoParallelStrategy.
    """

    def __init__(self, history: int = 1000) -> None:
        self._history: deque[dict[str, int]] = deque(maxlen=history)
        self._axes: dict[str, None] = {}
        self._steps = LaunchHistory()
        self._printed = False
        self._warned: set[str] = set()

    @property
    def launches(self) -> list[dict[str, int]]:
        """Measured launches by mesh axes, one entry per training step of this fit, the last ones only."""
        return list(self._history)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that counts nothing."""
        reporting_strategy(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew for every fit."""
        self._history.clear()
        self._axes.clear()
        self._steps = LaunchHistory()
        self._printed = False
        self._warned.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember, log and check the launches of the step that just ran."""
        strategy = reporting_strategy(trainer, self)
        measured, predicted = dict(strategy.measured_launches), strategy.predicted_launches
        self._history.append(measured)
        self._axes.update(dict.fromkeys((*predicted, *measured)))
        # Axes that this step did not use are logged as 0: Lightning would repeat their last value.
        for kind, counts in (("launches", measured), ("predicted_launches", predicted)):
            metrics = {axes: counts.get(axes, 0) for axes in self._axes} | {"total": sum(counts.values())}
            for name, count in metrics.items():
                key = f"autoparallel/{kind}/{name.replace(',', '-')}"
                pl_module.log(key, float(count), on_step=True, on_epoch=False, batch_size=1)
        self._check(self._steps.add(predicted, measured))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table, once per fit."""
        if self._printed:
            return
        self._printed = True
        if trainer.is_global_zero:
            print_table(_launch_table(reporting_strategy(trainer, self)))
            print_table(steps_table(self._steps))

    def _check(self, step: StepLaunches) -> None:
        differing = {axes: text for axes, text in step.differing().items() if axes not in self._warned}
        if differing:
            self._warned.update(differing)
            rank_zero_warn(
                f"training step {step.first} did not launch the collectives counted in its final graphs ("
                + "; ".join(differing.values())
                + "): other code communicates in these groups during the step"
            )


def _launch_table(strategy: ReportingStrategy) -> Table:
    table = make_table(
        f"{_library(strategy)} launches per step on one rank",
        ("step", "graph", "kind", "axes"),
        ("launches (predicted)", "size (predicted)", "launches (measured)"),
        caption="predicted: counted in the final graphs; measured: launches of the last training step",
    )
    for name, report in strategy.reports.items():
        for graph, kind, axes, counted in collective_rows(report):
            table.add_row(name, graph, kind, axes, str(counted.count), format_bytes(counted.size_bytes), "")
        table.add_section()
    measured, predicted = strategy.measured_launches, strategy.predicted_launches
    for axes in {**predicted, **measured}:
        counts = str(predicted.get(axes, 0)), _size(strategy, axes), str(measured.get(axes, 0))
        table.add_row(_TRAINING_STEP, "all", "all", axes, *counts)
    totals = str(sum(predicted.values())), _size(strategy), str(sum(measured.values()))
    table.add_row(_TRAINING_STEP, "all", "all", "total", *totals)
    return table


def _size(strategy: ReportingStrategy, wanted: str | None = None) -> str:
    report = strategy.reports.get(_TRAINING_STEP)
    rows = collective_rows(report) if report else ()
    return format_bytes(sum(counted.size_bytes for *_, axes, counted in rows if wanted in (None, axes)))


def _library(strategy: ReportingStrategy) -> str:
    """What starts the collectives on the strategy's device, out of ``nccl`` or ``cpu:gloo,cuda:nccl``."""
    for backend in (strategy.process_group_backend or "gloo").split(","):
        device_type, _, name = backend.rpartition(":")
        if device_type in ("", strategy.root_device.type):
            return "NCCL" if name == "nccl" else name
    return "gloo"
