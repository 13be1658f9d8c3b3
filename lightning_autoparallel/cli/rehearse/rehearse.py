"""The subcommand ``rehearse``: rank 0 of a job trains a few steps by itself, and is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_autoparallel.artifacts import ArtifactWriter, to_json
from lightning_autoparallel.callbacks.tables import print_table
from lightning_autoparallel.cli.measured_alone import MEASURED_ALONE
from lightning_autoparallel.cli.rehearse.rehearsal_clock import RehearsalClock
from lightning_autoparallel.cli.rehearse.rehearsal_table import NOTES, as_json, rehearsal_table
from lightning_autoparallel.cost.detect import detected_hardware
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import (
    DummyLogger,
    LightningDataModule,
    LightningModule,
    Precision,
    Trainer,
)
from lightning_autoparallel.lightning_compat.cli import LightningArgumentParser
from lightning_autoparallel.strategy.one_rank import alone, check_no_world
from lightning_autoparallel.strategy.rehearsal import RehearsalStrategy

REHEARSE = "rehearse"
_STEP = "training_step"
_WHOLE_STEPS = (
    "this training step runs its own Python around the modules that it calls, and what these exchange only ranks know "
    "that are there: only steps that are captured whole are rehearsed"
)


class RehearsingTrainer(Trainer):
    """A Trainer with the method of the subcommand ``rehearse``."""

    def rehearse(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        output: str | None = None,
        **options: Any,
    ) -> None:
        """Train a few steps as rank 0 of a world of any size, and print what it takes beside what is predicted.

        Parameters, optimizer, kernels and data are real; collectives move nothing. On a CPU, or one GPU.

        Args:
            model: it is trained.
            datamodule: gives rank 0's batches.
            output: where to write the figures as JSON.
            options: what the strategy and this Trainer were made from.

        Raises:
            ConfigError: ``output`` is a folder, a process group exists already, the training runs no whole step, or it
                ends before all steps are measured.
            AutoParallelError: the step cannot be captured or planned.
        """
        if output is not None and Path(output).is_dir():
            raise ConfigError(f"--output {output} is a folder: name the file to write to")
        strategy = self.strategy
        assert isinstance(strategy, RehearsalStrategy)
        (clock,) = (callback for callback in self.callbacks if isinstance(callback, RehearsalClock))  # type: ignore[attr-defined]
        check_no_world("rehearsing")
        if strategy.capture.mode == "forward" or not model.automatic_optimization:
            raise ConfigError(_WHOLE_STEPS)
        with alone():
            self.fit(model, datamodule=datamodule)
        if strategy.modes.get(_STEP) != "step":
            raise ConfigError(f"{_WHOLE_STEPS} (a warning above says why)")
        report, measured = strategy.reports[_STEP], clock.result()
        micro_batches = int(self.accumulate_grad_batches)
        is_here = _is_here(report.hardware, strategy.root_device.type)
        print_table(rehearsal_table(measured, report, strategy.world_size, is_here, micro_batches))
        print("\n".join(NOTES))
        if output is not None:
            text = to_json(as_json(measured, report, strategy.world_size, micro_batches))
            ArtifactWriter(Path(output).parent).text(Path(output).name, text)


def _is_here(hardware: Mapping[str, Any], device_type: str) -> bool:
    """Whether times are predicted for this device; measured rates are taken for its own where they are of its kind."""
    if hardware.get("is_measured"):
        return bool(hardware.get("backend") == ("nccl" if device_type == "cuda" else "gloo"))
    return bool(hardware.get("name") == detected_hardware(device_type).name)


def add_rehearse_arguments(parser: LightningArgumentParser) -> list[str]:
    """Add the arguments of ``rehearse`` and return their names in the parsed configuration."""
    parser.add_argument("--world-size", type=int, required=True, help="Ranks of the job.")
    parser.add_argument(
        "--ranks-per-node",
        type=int | None,
        default=None,
        help="Ranks of one node; those that the hardware's rates were measured with unless given.",
    )
    parser.add_argument("--warmup", type=int, default=2, help="Steps that are not timed, at first.")
    parser.add_argument("--steps", type=int, default=5, help="Steps that are timed.")
    parser.add_argument("--output", type=str | None, default=None, help="Write the figures to this JSON file.")
    return ["world_size", "ranks_per_node", "warmup", "steps", "output"]


def rehearsing_options(given: Mapping[str, Any], warmup: int, steps: int) -> dict[str, Any]:
    """The Trainer's arguments of a rehearsal, in the place of a training's: one process that keeps nothing.

    Raises:
        ConfigError: there is nothing to time.
    """
    if warmup < 1 or steps < 1:
        raise ConfigError(f"--warmup {warmup} and --steps {steps} must both be at least 1: the first step compiles")
    if given["accelerator"] in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"accelerator {given['accelerator']!r}, but this machine has no GPU: add --trainer.accelerator cpu, and "
            "--strategy.hardware h100 for the graphs that GPUs would run"
        )
    plugins = given["plugins"] if isinstance(given["plugins"], list) else [given["plugins"]]
    # A schedule may reach to either: they are only ever raised. A rank of many may have one batch in an epoch.
    needed = warmup + steps + 2
    ends = {"max_steps": given["max_steps"], "max_epochs": given["max_epochs"]}
    ends = {name: end if end in (None, -1) else max(end, needed) for name, end in ends.items()}
    return {
        **MEASURED_ALONE,
        "devices": 1,
        "plugins": [plugin for plugin in plugins if isinstance(plugin, Precision)] or None,
        "logger": DummyLogger(),  # for modules that speak to theirs
        "detect_anomaly": False,
        "callbacks": [RehearsalClock(warmup, steps)],
        **ends,
    }
