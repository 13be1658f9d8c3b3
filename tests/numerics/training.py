"""Train one case and say what came out: alone in this process, or as one rank of a world."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.capture import flatten_batch
from lightning_autoparallel.torch_compat.collectives import launched_collectives
from tests.numerics.models import make_batches, make_model
from tests.numerics.rules import plan_of
from tests.support.launches import Launches
from tests.support.slow_memory import SLOW_MEMORY

LaunchPair = tuple[dict[str, int], dict[str, int]]  # measured, predicted


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training to compare; `mesh` sizes multiply to the world.

    `plan` is a plan's name, or one of `tests.numerics.rules.BASES`; `clip` a norm that gradients are scaled down to;
    `accelerator` the Trainer's, with and without us.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    plan: str = "fsdp"
    optimizer: str = "adamw"
    compile: bool = False
    steps: int = 20
    rows: int = 12
    reshard_after_forward: bool = True
    accumulate: int = 1
    clip: float | None = None
    precision: str = "32-true"
    loss_chunks: int | str = "auto"
    accelerator: str = "cpu"

    @property
    def world_size(self) -> int:
        """Processes that the case needs."""
        size = 1
        for _, axis in self.mesh:
            size *= axis
        return size

    def __str__(self) -> str:
        mesh = "x".join(f"{name.removeprefix('dp_')}{size}" for name, size in self.mesh)
        parts = [self.model, self.plan, mesh, self.optimizer, "compiled" if self.compile else "interpreted"]
        parts += [] if self.reshard_after_forward else ["kept"]
        parts += [] if self.accumulate == 1 else [f"accumulate{self.accumulate}"]
        parts += [] if self.clip is None else ["clipped"]
        parts += [] if self.precision == "32-true" else [self.precision]
        parts += [] if self.loss_chunks == "auto" else [f"chunks{self.loss_chunks}"]
        parts += [] if self.accelerator == "cpu" else [self.accelerator]
        return "-".join(parts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Losses of all steps, logged metrics at the end, parameters and buffers in full, launches of the last step.

    `clipping` counts what clipping launches, by optimizer step. `steps` are the measured launches of every training
    step, with those in its graphs; `validation_steps` of every validation step. `heads` is what became of the losses'
    heads, as reported; `modes` how each step ran.
    """

    losses: list[float]
    metrics: dict[str, float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    measured: dict[str, int]
    predicted: dict[str, int]
    clipping: list[int]
    steps: list[LaunchPair]
    validation_steps: list[LaunchPair]
    heads: list[str]
    modes: dict[str, str]


class _LaunchesBySteps(Callback):
    """Measured and predicted launches of every step, training and validation."""

    def __init__(self) -> None:
        self.training: list[LaunchPair] = []
        self.validation: list[LaunchPair] = []
        self._before: dict[str, int] = {}

    def on_train_batch_end(self, trainer, *args):
        strategy = trainer.strategy
        if isinstance(strategy, AutoParallelStrategy):
            self.training.append((dict(strategy.measured_launches), strategy.predicted_launches))

    def on_validation_batch_start(self, trainer, *args):
        self._before = self._launched(trainer.strategy)

    def on_validation_batch_end(self, trainer, *args):
        strategy = trainer.strategy
        if not isinstance(strategy, AutoParallelStrategy):
            return
        axes, counts = strategy.mesh.axes_by_group(), {}
        for group, launched in self._launched(strategy).items():
            if launched != self._before.get(group, 0):  # groups may be new since
                counts[axes[group]] = launched - self._before.get(group, 0)
        self.validation.append((counts, strategy.reports["validation_step"].launches()))

    def _launched(self, strategy) -> dict[str, int]:
        mesh = getattr(strategy, "mesh", None)
        return {} if mesh is None else {group: launched_collectives(group) for group in mesh.groups}


class _Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def local_rows(batch: Any, rank: int, shards: int) -> Any:
    """One rank's rows of a global batch; what has no dim is alike on all ranks."""
    leaves, rebuild = flatten_batch(batch)
    return rebuild(
        [leaf.chunk(shards)[rank] if isinstance(leaf, Tensor) and leaf.dim() else leaf for _, leaf in leaves]
    )


def optimizer_of(module: LightningModule, name: str) -> torch.optim.Optimizer:
    """The optimizers that tolerances are stated for."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2)
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def run_case(case: Case, strategy: AutoParallelStrategy | None) -> Outcome:
    """Train the case under `strategy`, or under a plain single-device Trainer without one."""
    module = make_model(case.model)
    module.configure_optimizers = lambda: optimizer_of(module, case.optimizer)
    batches = make_batches(case.model, case.steps, case.rows)
    validation = make_batches(case.model, 2, case.rows, seed=2)

    def loader(global_batches: list[Any]) -> DataLoader:
        mesh = strategy.mesh if strategy is not None else None
        rank, shards = (mesh.data_parallel_rank, mesh.data_parallel_size) if mesh is not None else (0, 1)
        return DataLoader([local_rows(batch, rank, shards) for batch in global_batches], batch_size=None)

    module.train_dataloader = lambda: loader(batches)
    module.val_dataloader = lambda: loader(validation)
    recorder, launches, by_steps = _Recorder(), Launches(), _LaunchesBySteps()
    trainer = quiet_trainer(
        case.world_size if strategy is not None else 1,
        strategy,
        [recorder, launches, by_steps],
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        precision=case.precision,
        accelerator=case.accelerator,
    )
    trainer.fit(module)
    return Outcome(
        losses=recorder.losses,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items() if "per_second" not in name},
        parameters={name: full(parameter) for name, parameter in module.named_parameters()},
        buffers={name: full(buffer) for name, buffer in module.named_buffers()},
        measured=dict(strategy.measured_launches) if strategy is not None else {},
        predicted=_reported(strategy) if strategy is not None else {},
        clipping=launches.counts,
        steps=by_steps.training,
        validation_steps=by_steps.validation,
        heads=_heads(strategy) if strategy is not None else [],
        modes=strategy.modes if strategy is not None else {},
    )


def _heads(strategy: AutoParallelStrategy) -> list[str]:
    passes = [done for report in strategy.reports.values() for done in report.passes]
    return [note for done in passes if done.name == "chunk_loss_head" for note in done.notes]


def _reported(strategy: Any) -> dict[str, int]:
    """Launches of the last step, which reduces what earlier micro-batches have left."""
    reports = [strategy.reports[name] for name in ("training_step", "gradient_reduction") if name in strategy.reports]
    return dict(sum((Counter(report.launches()) for report in reports), Counter()))


def quiet_trainer(devices: int, strategy: Any, callbacks: list[Callback], **options: Any) -> Trainer:
    """A Trainer on CPUs, unless told, without logs, bars and checkpoints: one epoch over what the loaders hold."""
    chosen: Mapping[str, Any] = {} if strategy is None else {"strategy": strategy}
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "logger": False, "enable_checkpointing": False}
    return Trainer(
        devices=devices,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tempfile.gettempdir(),
        callbacks=callbacks,
        **{"accelerator": "cpu", **defaults, **chosen, **options},
    )


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on the host, of a DTensor gathered from all ranks."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().cpu().clone()


def run_rank(case: Case) -> Outcome:
    """This rank's part of the case in a world of processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = AutoParallelStrategy(
            mesh=dict(case.mesh),
            plan=plan_of(case.model, case.plan),
            compile=case.compile,
            reshard_after_forward=case.reshard_after_forward,
            loss_chunks=case.loss_chunks,
            # Plans that are found for small models would leave them whole: nothing is worth a latency there.
            hardware=dict(SLOW_MEMORY) if case.plan == "auto" else None,
        )
        return run_case(case, strategy)
