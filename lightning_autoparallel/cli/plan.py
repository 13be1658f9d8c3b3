"""The subcommand ``plan``: what a recipe would run on a world of any size, without one."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_autoparallel.artifacts import ArtifactWriter, to_json
from lightning_autoparallel.callbacks.kinds import blocks_table, kinds_table
from lightning_autoparallel.callbacks.plan_report import collectives_table
from lightning_autoparallel.callbacks.tables import format_bytes, print_table
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.strategy.planning import run_planning

PLAN = "plan"


class CommandTrainer(Trainer):
    """The Trainer: Lightning's own, and the method of the subcommand ``plan``."""

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        output: str | None = None,
        **options: Any,
    ) -> None:
        """Capture, plan and count the training step for a world of any size, in one CPU process.

        Args:
            model: its training step is planned.
            datamodule: gives the sample batch.
            output: where to write the report as JSON.
            options: what the strategy and this Trainer were made from.

        Raises:
            ConfigError: ``output`` is a folder, a process group exists already, or there is no batch to plan for.
            AutoParallelError: the step cannot be captured or planned.
        """
        if output is not None and Path(output).is_dir():
            raise ConfigError(f"--output {output} is a folder: name the file to write the report to")
        start = time.perf_counter()
        report = run_planning(self, model, datamodule)
        if output is not None:
            ArtifactWriter(Path(output).parent).text(Path(output).name, to_json(report.as_json()))
        print_report(report, time.perf_counter() - start)


def add_plan_arguments(parser: LightningArgumentParser) -> list[str]:
    """Add the arguments of ``plan`` and return their names in the parsed configuration."""
    parser.add_argument("--world-size", type=int, required=True, help="Ranks of the fake world.")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="Ranks of one node.")
    parser.add_argument("--output", type=str | None, default=None, help="Write the report to this JSON file.")
    parser.add_argument("--dump", type=str | None, default=None, help="Write graphs and the report to this folder.")
    parser.add_argument("--inference", action="store_true", help="Plan the validation step too.")
    return ["world_size", "ranks_per_node", "output", "dump", "inference"]


def print_report(report: PlanReport, seconds: float) -> None:
    """Print a report to standard output, and after it how long this process took and how much memory it needed."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in report.mesh.items())
    print(f"{report.graph} on mesh {{{mesh}}}, plan {report.plan}\n")
    for table in (collectives_table(report), blocks_table(report), kinds_table(report)):
        print_table(table)
        print()
    for note in report.notes:
        print(f"note: {note}")
    stages = ", ".join(f"{stage} {spent:.2f} s" for stage, spent in report.timings_s.items())
    print(f"{stages}; in all {seconds:.2f} s, peak host memory {format_bytes(_peak_host_bytes())}")


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
