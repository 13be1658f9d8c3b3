"""What tools tell of a training: norms of gradients, numbers of parameters, how many steps there will be."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_autoparallel.errors import ConfigError
from tests.conformance.saved import MESHES, RULES
from tests.distributed.jobs import MESH, Net, assert_equals_one_device, make_strategy, make_trainer, train
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

TP: dict[str, Any] = {"plan": {"base": "fsdp", "rules": RULES}}


class Norms(Net):
    """Norms of gradients, clipped afterwards, and numbers of single parameters; one weight has uneven shards."""

    strategy: ClassVar = {"plan": "fsdp"}
    trainer_options: ClassVar = {"gradient_clip_val": 0.3}

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.log("total", norms["grad_2.0_norm_total"].item())
        self.log("largest", grad_norm(self.net, "inf")["grad_inf_norm_total"])
        self.log("one", self.net[2].weight.grad.norm().item())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.net[2].weight
        self.log_dict({"sum": weight.sum(), "max": weight.abs().max()}, on_step=True, on_epoch=True)
        self.log_dict({"float": float(weight.norm()), "counted": int((weight > 0).sum())})

    def on_train_epoch_end(self):
        stacked = torch.stack([parameter.norm() for parameter in self.parameters()])
        self.log_dict({"stacked": stacked.norm(), "bias": self.net[2].bias.prod().item()})


class NormsEven(Norms):
    """No rank's shard is empty: torch knows no maximum of an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


class NormsTp(Norms):
    strategy: ClassVar = TP


class NormsForward(Norms):
    """Of the rank's rows are the losses only."""

    strategy: ClassVar = {"capture": "forward"}


CASES = [(Norms, "1"), (Norms, "2"), (NormsEven, "2x2"), (NormsTp, "tp"), (NormsTp, "2xtp"), (NormsForward, "2")]


@pytest.mark.parametrize(("kind", "mesh"), tiered(CASES, lambda case: case == (Norms, "2")))
def test_norms_and_numbers_are_those_of_one_device(kind: type[Net], mesh: str, worlds: Worlds) -> None:
    expected = train(kind, None)
    size = {"1": 1, "2": 2, "tp": 2}.get(mesh, 4)
    outcomes = worlds(size).run(train, kind, MESHES[mesh], size)
    assert {"grad_2.0_norm_total", "total", "largest", "one", "float", "bias"} <= expected.metrics.keys()
    if kind is NormsForward:
        for outcome in outcomes:
            torch.testing.assert_close(outcome.metrics, expected.metrics, rtol=1e-5, atol=1e-7)
    else:
        assert_equals_one_device(outcomes, expected)


class CountsSteps(Net):
    """How many optimizer steps there will be, asked where schedulers are made."""

    epochs = 3
    trainer_options: ClassVar = {"accumulate_grad_batches": 2}

    def configure_optimizers(self):
        self.steps_ahead = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=self.steps_ahead)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def extra(self):
        return self.steps_ahead, self.trainer.global_step


def test_steps_are_counted_where_schedulers_are_made(worlds: Worlds) -> None:
    expected = train(CountsSteps, None)
    outcomes = worlds(2).run(train, CountsSteps, MESH)
    assert_equals_one_device(outcomes, expected)
    assert [outcome.extra for outcome in outcomes] == [(6, 6)] * 2


class Rows(Net):
    """A data set that Lightning's own sampler shares out."""

    def train_dataloader(self):
        return DataLoader([row for x, y in self.batches() for row in zip(x, y, strict=True)], batch_size=4)


def counted_before_launch(mesh: Mapping[str, int] | None) -> tuple[Any, ...]:
    """What is known before the processes have met, and what came true."""
    torch.manual_seed(0)
    module = Rows()
    world = math.prod(mesh.values()) if mesh else 1
    strategy = make_strategy(mesh, TP if mesh and "tp" in mesh else {}) if mesh else None
    trainer = make_trainer(strategy, world, max_epochs=2, use_distributed_sampler=True)
    rank, zero = trainer.global_rank, trainer.is_global_zero
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    module.trainer = trainer
    steps = trainer.estimated_stepping_batches
    sampler = trainer.train_dataloader.sampler
    trainer.fit(module)
    shard = (sampler.rank, sampler.num_replicas) if mesh else (0, 1)
    return steps, trainer.global_step, rank, trainer.world_size, zero, shard


@pytest.mark.parametrize("mesh", tiered(["2", "2xtp"], "2".__eq__))
def test_steps_are_counted_before_the_processes_start(mesh: str, worlds: Worlds) -> None:
    assert counted_before_launch(None) == (16, 16, 0, 1, True, (0, 1))
    size = math.prod(MESHES[mesh].values())
    seen = worlds(size).run(counted_before_launch, MESHES[mesh])
    shards = [rank if mesh == "2" else rank // 2 for rank in range(size)]
    assert seen == [(8, 8, rank, size, rank == 0, (shard, 2)) for rank, shard in enumerate(shards)]


class Finds(Rows):
    """A rate to be found: with and without a scheduler, whose state an optimizer keeps too."""

    def __init__(self, scheduled: bool) -> None:
        super().__init__()
        self.lr, self.scheduled = 0.02, scheduled

    def train_dataloader(self):
        strategy = self.trainer.strategy
        mesh = getattr(strategy, "mesh", None)
        return self.loader(*((0, 1) if mesh is None else (mesh.data_parallel_rank, mesh.data_parallel_size)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        if not self.scheduled:
            return optimizer
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def find(mesh: Mapping[str, int] | None, scheduled: bool, as_folder: bool, as_callback: bool) -> dict[str, Any]:
    """What the finder gives, what it leaves behind, and the training after it."""
    torch.manual_seed(0)
    module, found = Finds(scheduled), {"min_lr": 1e-4, "max_lr": 1.0, "early_stop_threshold": None}
    strategy = make_strategy(mesh, {"save_distributed_checkpoint": as_folder}) if mesh is not None else None
    callback = LearningRateFinder(num_training_steps=6, **found)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [callback] if as_callback else []
        trainer = make_trainer(strategy, 2 if mesh else 1, max_epochs=2, callbacks=callbacks, default_root_dir=folder)
        finder = None if as_callback else Tuner(trainer).lr_find(module, num_training=6, **found)
        trainer.fit(module)
        left = os.listdir(folder)
    finder = finder or callback.optimal_lr
    return {
        **{key: torch.tensor(values) for key, values in finder.results.items()},
        "rates": torch.tensor([module.lr, trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step, len(left)]),
        "parameters": {name: full(parameter).clone() for name, parameter in module.named_parameters()},
    }


FINDINGS = list(itertools.product([True, False], [True, False], [False, True]))


@pytest.mark.parametrize(
    ("scheduled", "as_folder", "as_callback"), tiered(FINDINGS, lambda case: case == (False, True, False))
)
def test_the_rate_finder_finds_the_same_and_leaves_nothing(
    scheduled: bool, as_folder: bool, as_callback: bool, worlds: Worlds
) -> None:
    expected = find(None, scheduled, as_folder, as_callback)
    for seen in worlds(2).run(find, MESH, scheduled, as_folder, as_callback):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


def traced(mesh: Mapping[str, int]) -> str:
    """What is said to a logger that traces the module."""
    module = Net()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(make_strategy(mesh, {}), 2, logger=TensorBoardLogger(folder, log_graph=True))
        try:
            trainer.fit(module, module.loader(0, 2))
        except ConfigError as error:
            return str(error)
    return "no error"


def test_tracing_loggers_are_refused(worlds: Worlds) -> None:
    for said in worlds(2).run(traced, MESH):
        assert said.startswith("TensorBoardLogger(log_graph=True) traces the module on rank 0 alone")
