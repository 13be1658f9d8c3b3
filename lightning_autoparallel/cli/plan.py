"""The subcommand ``plan``: what a recipe would run on a world of any size, without one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_autoparallel.artifacts import ArtifactWriter, to_json
from lightning_autoparallel.callbacks.peak_memory import peak_bytes_since_start
from lightning_autoparallel.callbacks.plan_report import report_tables
from lightning_autoparallel.callbacks.predictions import (
    decomposition_lines,
    predicted_lines,
)
from lightning_autoparallel.callbacks.tables import print_table
from lightning_autoparallel.callbacks.tried_meshes import meshes_table
from lightning_autoparallel.cli.collecting import collected_rarely
from lightning_autoparallel.cli.compare import check_comparable, comparison_tables
from lightning_autoparallel.cli.explanations import explanation_lines
from lightning_autoparallel.cli.page import report_page
from lightning_autoparallel.cli.plot import check_plots, write_plots
from lightning_autoparallel.cli.report_file import figures_of, read_report
from lightning_autoparallel.cli.trace import chrome_trace
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningDataModule, LightningModule, Trainer
from lightning_autoparallel.lightning_compat.cli import ArgsType, LightningArgumentParser
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.strategy.planned_device import CPU, CUDA
from lightning_autoparallel.strategy.planning import run_planning
from lightning_autoparallel.torch_compat.cuda_guards import environment_with_guards

PLAN = "plan"


class CommandTrainer(Trainer):
    """The Trainer: Lightning's own, and the method of the subcommand ``plan``."""

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        output: str | None = None,
        hardware: str | dict[str, Any] | None = None,
        trace: str | None = None,
        plot: str | None = None,
        html: str | None = None,
        compare: str | None = None,
        explain: str | None = None,
        **options: Any,
    ) -> None:
        """Capture, plan, count and time the training step for a world of any size, in one CPU process.

        Args:
            model: its training step is planned.
            datamodule: gives the sample batch.
            output: where to write the report as JSON.
            hardware: predict times for it: cpu, a100-80gb, h100, h100-96gb-500w, h200, b200, mi300x, a file of
                `calibrate`, or {base: h100, KEY: RATE}; the GPU here unless given, h100 where there is none.
            trace: write the predicted timeline to this file, for Perfetto or chrome://tracing.
            plot: draw predicted memory and timeline as PNG files into this folder.
            html: write the report to this file as a page for a browser.
            compare: show where this plan differs from that of a report, which --output has written, and what it costs.
            explain: say why parameters, modules and calls that this glob matches are placed so, and what else costs.
            options: what the strategy and this Trainer were made from.

        Raises:
            ConfigError: ``output``, ``trace`` or ``html`` is a folder, the hardware is not known, ``plot`` lacks
                matplotlib, a process group exists already, there is no batch to plan for, ``compare`` is no report
                of this model, or ``explain`` matches nothing.
            AutoParallelError: the step cannot be captured or planned.
        """
        for name, file in (("output", output), ("trace", trace), ("html", html)):
            if file is not None and Path(file).is_dir():
                raise ConfigError(f"--{name} {file} is a folder: name the file to write to")
        if plot is not None:
            check_plots()
        assert isinstance(self.strategy, PlanningStrategy)
        if hardware is not None:
            self.strategy.predict_for(hardware)
        if explain is not None:
            self.strategy.explain(explain)
        other = None if compare is None else read_report(compare)
        if other is not None:
            # A module that is built in configure_model has no parameters yet.
            check_comparable({n: tuple(p.shape) for n, p in model.named_parameters()}, other, whole=False)
        start = time.perf_counter()
        with collected_rarely():
            report = run_planning(self, model, datamodule)
        if other is not None:
            check_comparable({name: parameter.shape for name, parameter in report.parameters.items()}, other)
        _write(report, output, trace, plot, html)
        print_report(report, time.perf_counter() - start)
        if report.explanation is not None:
            print()
            for line in explanation_lines(report.explanation):
                print(line)
        if other is not None:
            print()
            for table in comparison_tables(figures_of(report.as_json()), other):
                print_table(table)
                print()


def add_plan_arguments(parser: LightningArgumentParser) -> list[str]:
    """Add the arguments of ``plan`` and return their names in the parsed configuration."""
    parser.add_argument("--world-size", type=int, required=True, help="Ranks of the fake world.")
    parser.add_argument(
        "--ranks-per-node",
        type=int | None,
        default=None,
        help="Ranks of one node; those that the hardware's rates were measured with unless given.",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int | None,
        default=None,
        help="Rows of one optimizer step; with --strategy.mesh auto only meshes that get there by accumulating.",
    )
    parser.add_argument(
        "--device",
        choices=(CPU, CUDA),
        default=CPU,
        help="What the step is captured for: cuda has it call CUDA's kernels, without a GPU too (with a C++ compiler).",
    )
    parser.add_argument("--output", type=str | None, default=None, help="Write the report to this JSON file.")
    parser.add_argument("--dump", type=str | None, default=None, help="Write graphs and the report to this folder.")
    parser.add_argument("--inference", action="store_true", help="Plan the validation step too.")
    return ["world_size", "ranks_per_node", "global_batch_size", "device", "output", "dump", "inference"]


def plan_with_guards(args: ArgsType) -> int:
    """Run the same command in a process that can trace for CUDA without a GPU; its exit status.

    Raises:
        ConfigError: there is no such process on this machine, or its command line is not known.
    """
    if args is not None and not isinstance(args, list):
        raise ConfigError("--device cuda without a GPU starts the command anew: hand it over as a list of words")
    words = sys.orig_argv[1:] if args is None else ["-m", "lightning_autoparallel.cli.main", *args]
    status = subprocess.run([sys.executable, *words], env=environment_with_guards(), check=False).returncode
    return status if status >= 0 else 128 - status  # as a shell has it, of a signal


def _write(report: PlanReport, output: str | None, trace: str | None, plot: str | None, html: str | None) -> None:
    """The files that were asked for.

    Raises:
        ConfigError: a picture of predictions, of which there are none.
    """
    if output is not None:
        ArtifactWriter(Path(output).parent).text(Path(output).name, to_json(report.as_json()))
    if html is not None:
        ArtifactWriter(Path(html).parent).text(Path(html).name, report_page(report))
    if (trace is not None or plot is not None) and not report.predictions:
        raise ConfigError(f"nothing to draw for --trace or --plot: {'; '.join(report.notes)}")
    if trace is not None:
        ArtifactWriter(Path(trace).parent).text(Path(trace).name, to_json(chrome_trace(report)))
    if plot is not None:
        write_plots(report, Path(plot))


def print_report(report: PlanReport, seconds: float) -> None:
    """Print a report to standard output, and after it how long this process took and how much memory it needed."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in report.mesh.items())
    if report.meshes:
        print_table(meshes_table(report.meshes))
        print()
    print(f"{report.graph} on mesh {{{mesh}}}, plan {report.plan}\n")
    for table in report_tables(report):
        print_table(table)
        print()
    for line in (*decomposition_lines(report), *predicted_lines(report)):
        print(line)
    for note in report.notes:
        print(f"note: {note}")
    stages = ", ".join(f"{stage} {spent:.2f} s" for stage, spent in report.timings_s.items())
    # on a machine that others use, too, wall seconds say little
    passes = sum(done.seconds for done in report.passes)
    print(f"passes alone {passes:.2f} s; CPU time of this process, its imports included, {time.process_time():.2f} s")
    print(f"{stages}; in all {seconds:.2f} s, peak host memory {format_bytes(peak_bytes_since_start())}")
