"""Train a small module and say what came out: alone in this process, or as one rank of a world."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.errors import AutoParallelError
from tests.numerics.training import full, local_rows

MESH = {"dp_shard": 2}


class Net(LightningModule):
    """A small classifier on the global batches of `batches`; subclasses change what the step does besides."""

    epochs = 1
    steps = 4
    rows = 8
    strategy: ClassVar[Mapping[str, Any]] = {}
    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def batches(self) -> list[Any]:
        """The global batches of one epoch."""
        generator = torch.Generator().manual_seed(1)
        return [
            (
                torch.randn(self.rows, 6, generator=generator),
                torch.randint(0, 3, (self.rows,), generator=generator),
            )
            for _ in range(self.steps)
        ]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def loader(self, rank: int, shards: int) -> DataLoader:
        """What one rank reads."""
        return DataLoader([local_rows(batch, rank, shards) for batch in self.batches()], batch_size=None)

    def callbacks(self) -> list[Callback]:
        """More callbacks for the Trainer."""
        return []

    def extra(self) -> Any:
        """What else a test wants to know after training."""
        return None


class ByHand(Net):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.behind_backward()
        optimizer.step()

    def behind_backward(self) -> None:
        """What a step does ahead of its update."""


class Validated(Net):
    """Logs its losses, and validates on what it trains on."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def val_dataloader(self) -> DataLoader:
        mesh = getattr(self.trainer.strategy, "mesh", None)
        return self.loader(*((0, 1) if mesh is None else (mesh.data_parallel_rank, mesh.data_parallel_size)))


class Uneven(Net):
    """Rows of parameters that divide by nothing, a scalar, a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3, 2))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.scale, y)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process saw of a training."""

    losses: list[float]
    logged: list[dict[str, float]]
    metrics: dict[str, float]
    parameters: dict[str, Tensor]
    warnings: list[str]
    extra: Any = None
    captures: list[str] = field(default_factory=list)

    def said(self, text: str) -> int:
        """How many warnings contain `text`."""
        return sum(text in warning for warning in self.warnings)


class MemoryLogger(Logger):
    """Keeps what is logged, on every rank."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def log_hyperparams(self, *args, **kwargs):
        """Not kept."""


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]) if outputs else math.nan)


def make_strategy(mesh: Mapping[str, int], options: Mapping[str, Any]) -> AutoParallelStrategy:
    """The strategy on `mesh`, interpreted unless `options` say otherwise."""
    return AutoParallelStrategy(mesh=dict(mesh), **{"compile": False, **options})


def make_trainer(strategy: AutoParallelStrategy | None, devices: int, **options: Any) -> Trainer:
    """A Trainer on CPUs, unless told, without bars and checkpoints."""
    chosen = {} if strategy is None else {"strategy": strategy}
    defaults = {
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "default_root_dir": tempfile.gettempdir(),
    }
    return Trainer(
        devices=devices,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", **defaults, **chosen, **options},
    )


def train(kind: type[Net], mesh: Mapping[str, int] | None, world: int = 2) -> Outcome:
    """Fit a `kind` on `mesh`, or on one device without us where `mesh` is None."""
    torch.manual_seed(0)
    module = kind()
    strategy = make_strategy(mesh, kind.strategy) if mesh is not None else None
    losses, logger = Losses(), MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"max_epochs": kind.epochs, **module.trainer_options}
        callbacks = [losses, *module.callbacks()]
        trainer = make_trainer(
            strategy, world if strategy is not None else 1, logger=logger, callbacks=callbacks, **options
        )

        def loader() -> DataLoader:
            if strategy is None:
                return module.loader(0, 1)
            return module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)

        module.train_dataloader = loader
        trainer.fit(module)
    return Outcome(
        losses=losses.values,
        logged=logger.rows,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        parameters={name: full(parameter) for name, parameter in module.named_parameters()},
        warnings=[str(warning.message) for warning in caught],
        extra=module.extra(),
    )


def failure(kind: type[Net], mesh: Mapping[str, int] | None = MESH, world: int = 2) -> tuple[str, float]:
    """The error that fitting raises for the user, with its kind, and the seconds that took."""
    start = time.monotonic()
    try:
        train(kind, mesh, world)
    except AutoParallelError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def assert_equals_one_device(outcomes: list[Outcome], expected: Outcome, tolerance: float = 1e-5) -> None:
    """Losses, logged values, metrics and parameters of all ranks are those of one device."""
    for outcome in outcomes:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=tolerance, atol=1e-7)
        assert [row.keys() for row in outcome.logged] == [row.keys() for row in expected.logged]
        torch.testing.assert_close(outcome.logged, expected.logged, rtol=tolerance, atol=1e-7)
        torch.testing.assert_close(outcome.metrics, expected.metrics, rtol=tolerance, atol=1e-7)
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=tolerance, atol=1e-6)
