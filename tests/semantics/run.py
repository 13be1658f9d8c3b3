"""Trains a case and says what came out: plainly, under Lightning's DDPStrategy, or under ours in one of its modes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.errors import AutoParallelError
from tests.semantics.base import Case
from tests.semantics.portable import portable

PLAIN, DDP = "plain", "ddp"


@dataclass(kw_only=True)
class Outcome:
    """What one process saw of a training.

    `error` is one of ours that ended it; `mode_at` says how each training step ran.
    """

    losses: list[float | None] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    kept: list[dict[str, Any]] = field(default_factory=list)
    validated: list[Any] = field(default_factory=list)
    predicted: Any = None
    printed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    modes: dict[str, str] = field(default_factory=dict)
    mode_at: list[str] = field(default_factory=list)
    error: str | None = None
    rank: int = 0


class MemoryLogger(Logger):
    """Keeps what is logged, on every rank; itself what steps call as `experiment`."""

    name, version, save_dir = "memory", 0, tempfile.gettempdir()

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    @property
    def experiment(self) -> MemoryLogger:
        return self

    def add_scalar(self, name: str, value: Any, step: Any = None) -> None:
        self.rows.append({"step": portable(step), name: portable(value)})

    def log_metrics(self, metrics, step=None):
        self.rows.append({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def log_hyperparams(self, *args, **kwargs):
        """Not kept."""


class Watch(Callback):
    """The result of every step, and attributes after it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.outcome.losses.append(None if loss is None else float(loss))
        rest = {k: v for k, v in outputs.items() if k != "loss"} if isinstance(outputs, dict) else {}
        self.outcome.results.append(portable(rest))
        self.outcome.kept.append(state_of(pl_module))
        self.outcome.mode_at.append(modes_of(trainer.strategy).get("training_step", "step"))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.outcome.validated.append(portable(outputs))


class SkippingDDP(DDPStrategy):
    """DDP where all ranks may return None from a step alike, which the loop refuses by asking for the world's size."""

    _is_asked = False

    def post_training_step(self) -> None:
        self._is_asked = True

    @property
    def world_size(self) -> int:
        asked, self._is_asked = self._is_asked, False
        return 1 if asked else super().world_size


def state_of(module: Case) -> dict[str, Any]:
    """The attributes that the case keeps, as they are now."""
    state = {}
    for name in module.keeps:
        try:
            state[name] = portable(attrgetter(name)(module))
        except AttributeError:
            state[name] = "missing"
    return state


def strategy_for(kind: type[Case], how: str) -> Any:
    """None, Lightning's or ours; `how` is a value of `capture` then."""
    if how == PLAIN:
        return None
    if how == DDP:
        return SkippingDDP(find_unused_parameters=kind.leaves_unused, process_group_backend="gloo")
    known = "capture" in inspect.signature(AutoParallelStrategy).parameters
    capture = {"capture": how} if known else {}
    return AutoParallelStrategy(mesh={"dp_shard": -1}, **{"compile": False, **capture, **kind.strategy_options})


def modes_of(strategy: Any) -> dict[str, str]:
    """How our strategy ran each step, by its name."""
    return dict(getattr(strategy, "modes", {}))


def train(kind: type[Case], how: str) -> Outcome:
    """Fit the case, and predict with it, in this process or as its rank of the world."""
    outcome = Outcome()
    printed = io.StringIO()
    kind.reset()
    seed()
    module = kind()
    strategy = strategy_for(kind, how)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed), threads_kept():
        warnings.simplefilter("always")
        try:
            _fit(kind, module, strategy, outcome)
        except AutoParallelError as error:
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.printed = printed.getvalue().splitlines()
    outcome.warnings = [str(warning.message) for warning in caught]
    outcome.modes.update(modes_of(strategy))
    outcome.rank = dist.get_rank() if strategy is not None else 0
    kind.reset()
    return outcome


def _fit(kind: type[Case], module: Case, strategy: Any, outcome: Outcome) -> None:
    rank, shards = (dist.get_rank(), dist.get_world_size()) if strategy is not None else (0, 1)
    logger = MemoryLogger()
    trainer = make_trainer(kind, module, strategy, shards, logger, outcome)
    module.train_dataloader = lambda: module.loader(module.batches(), rank, shards)
    if kind.validates:
        module.val_dataloader = lambda: module.loader(module.validation_batches(), rank, shards)
    seed()
    try:
        trainer.fit(module)
    finally:
        outcome.logged = logger.rows
    outcome.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    outcome.parameters = {name: portable(tensor) for name, tensor in tensors}
    outcome.kept.append(state_of(module))
    outcome.modes.update(modes_of(strategy))
    if kind.predicts:
        module.predict_dataloader = lambda: module.loader(module.validation_batches(), rank, shards)
        outcome.predicted = portable(trainer.predict(module, return_predictions=True))


def make_trainer(
    kind: type[Case], module: Case, strategy: Any, devices: int, logger: MemoryLogger, outcome: Outcome
) -> Trainer:
    """A CPU Trainer without bars and checkpoints."""
    options = {
        "max_epochs": kind.epochs,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "default_root_dir": tempfile.gettempdir(),
        **({} if strategy is None else {"strategy": strategy}),
        **module.arguments(),
    }
    return Trainer(
        accelerator="cpu",
        devices=devices,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=[Watch(outcome), *module.callbacks()],
        **options,
    )


def seed() -> None:
    """The same draws on each rank and in each run."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """One thread of torch: two ranks train beside each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def find(name: str) -> type[Case]:
    """The case of `file.Class`."""
    file, _, kind = name.partition(".")
    return getattr(importlib.import_module(f"tests.semantics.cases.{file}"), kind)


def run_rank(name: str, *hows: str) -> dict[str, Outcome]:
    """The case trained in each way on this rank of a world."""
    return {how: train(find(name), how) for how in hows}
