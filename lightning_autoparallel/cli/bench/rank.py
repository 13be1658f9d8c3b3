"""One process of a measurement: ``python -m lightning_autoparallel.cli.bench.rank FOLDER`` with the job in it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_autoparallel.cli.bench.batch_clock import BenchClock, process_memory_bytes
from lightning_autoparallel.cli.bench.measurements import OURS, Contender, Job, RankResult
from lightning_autoparallel.cli.bench.processes import error_path, result_path
from lightning_autoparallel.cli.bench.rows import RowSplit, lightning_strategy
from lightning_autoparallel.cli.bench.wrap import prepare_module
from lightning_autoparallel.cli.measured_alone import MEASURED_ALONE
from lightning_autoparallel.lightning_compat import ClusterEnvironment, LightningEnvironment, Strategy, Trainer
from lightning_autoparallel.lightning_compat.cli import LightningArgumentParser, LightningCLI
from lightning_autoparallel.strategy import AutoParallelStrategy

_STEP = "training_step"


class RankCLI(LightningCLI):
    """Builds model and data of a job's config, and a Trainer with the contender's strategy."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.clock = BenchClock(job.warmup, job.steps, process_memory_bytes())
        super().__init__(
            run=False,
            parser_kwargs={"parser_mode": "omegaconf"},
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            args=dict(job.config),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The section `strategy:`, as the command has it."""
        parser.add_class_arguments(AutoParallelStrategy, "strategy")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The config's Trainer on this job's processes, with the clock as its only callback."""
        given = self._get(self.config_init, "trainer")
        return Trainer(
            **{**given, **timed_only(given, self._job), "strategy": self._strategy(), "callbacks": [self.clock]}
        )

    def _strategy(self) -> Strategy:
        configured: AutoParallelStrategy = self._get(self.config_init, "strategy")
        contender = self._job.contender
        if contender.kind == OURS:
            return configured
        prepare_contender(self.model, contender)
        split = RowSplit.of(configured.spec.resolve(self._job.processes), configured.batch_dims)
        return lightning_strategy(contender.kind, split, configured.process_group_backend, configured.timeout)


def prepare_contender(module: Any, contender: Contender) -> None:
    """Change ``module`` as the contender's strategy needs it."""
    if contender.kind == "fsdp2" or contender.compiled:
        prepare_module(module, shard=contender.kind == "fsdp2", compiled=contender.compiled)


def timed_only(given: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The Trainer's arguments of a run that trains on the job's processes, and keeps and shows nothing."""
    batches = job.warmup + job.steps + 1
    plugins = given["plugins"] or []
    plugins = plugins if isinstance(plugins, list) else [plugins]
    # Lightning's strategies shuffle anew for a single process too, which then reads other rows than one device.
    order = {"use_distributed_sampler": False} if job.processes == 1 else {}
    # A schedule may reach to max_steps: it is only ever raised. With it, epochs are repeated as long as needed.
    ends = {} if given["max_steps"] < 0 else {"max_steps": max(given["max_steps"], batches), "max_epochs": -1}
    return {
        **MEASURED_ALONE,
        "devices": job.processes,
        "plugins": [*(p for p in plugins if not isinstance(p, ClusterEnvironment)), LightningEnvironment()],
        "logger": False,
        **order,
        **ends,
    }


def read_job(folder: Path) -> Job:
    """The job that was written there."""
    written = json.loads((folder / "job.json").read_text())
    return Job(**{**written, "contender": Contender(**written["contender"])})


def train(job: Job) -> RankResult:
    """Train in this process, one of the job's, and return what it measured.

    Raises:
        ConfigError: training ended before all batches were timed.
    """
    cli = RankCLI(job)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    strategy = cli.trainer.strategy
    report = strategy.reports[_STEP] if isinstance(strategy, AutoParallelStrategy) else None
    return cli.clock.result(cli.trainer, report)


def main(folder: Path) -> None:
    """Measure and write the result, or the error, for the process that waits for it."""
    job = read_job(folder)
    rank = LightningEnvironment().local_rank()
    try:
        result = train(job)
    except BaseException as error:
        error_path(folder, rank).write_text(f"{type(error).__name__}: {error}")
        raise
    result_path(folder, rank).write_text(json.dumps(dataclasses.asdict(result)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
