"""The module called by hooks and callbacks, outside of its steps."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.pipeline import agreement
from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

MESHES: dict[int, Any] = {1: {"dp_shard": 1}, 2: MESH, 4: {"dp_replicate": 2, "dp_shard": 2}}
X = torch.linspace(-1, 1, 12).view(2, 6)


class Looks(Callback):
    """Calls the module, and a part of it, at many moments; keeps what it gave."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _look(self, module: nn.Module) -> None:
        self.seen.append(module(X).detach().clone())

    def on_fit_start(self, trainer, pl_module):
        self._look(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self._look(pl_module)

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self._look(pl_module.net)

    def on_validation_epoch_end(self, trainer, pl_module):
        self._look(pl_module)

    def on_train_end(self, trainer, pl_module):
        self._look(pl_module.net[0])

    def on_fit_end(self, trainer, pl_module):
        self._look(pl_module)


class Evaluating(Net):
    """Generates at the end of each epoch, and logs what came out."""

    strategy: ClassVar = {"plan": "fsdp"}
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.looks = Looks()
        self.val_dataloader = lambda: DataLoader([(X, torch.tensor([0, 1]))], batch_size=None)

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def callbacks(self):
        return [self.looks]

    def extra(self):
        return self.looks.seen

    def on_validation_epoch_end(self):
        x = X
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([self(x), x[:, :3]], dim=1)
        self.log("sample", x.mean())

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.log("start", self(X).sum())


class EvaluatingForward(Evaluating):
    strategy: ClassVar = {"capture": "forward"}


class Late(Net):
    """Rank 1 comes late to a call that all make."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            time.sleep(2.0 * self.trainer.global_rank)
            self.net(X)


class ThenAStep(Net):
    """Rank 0 samples alone, before the first step."""

    def on_train_start(self):
        if self.trainer.is_global_zero:
            self.net(X)
        self.trainer.strategy.training_step(self.batches()[0], 0)


class AveragesAlone(Net):
    """Rank 0 brings its average up to date alone, before the first step."""

    def on_train_start(self):
        if self.trainer.is_global_zero:
            torch.zeros(10, 6).lerp_(self.net[0].weight.detach(), 0.5)
        self.trainer.strategy.training_step(self.batches()[0], 0)


def impatient(kind: type[Net]) -> tuple[str, int]:
    """The error of a training, and how often it was said that a rank waits."""
    with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.5)):
        try:
            outcome = train(kind, MESH)
        except AutoParallelError as error:
            return f"{type(error).__name__}: {error}", 0
    return "no error", outcome.said("calls Sequential outside of a step on rank 0, and waits")


CASES = [(kind, world) for kind in (Evaluating, EvaluatingForward) for world in MESHES]


@pytest.mark.parametrize(("kind", "world"), tiered(CASES, lambda case: case == (Evaluating, 2)))
def test_what_the_module_gives_is_what_it_gives_on_one_device(kind: type[Net], world: int, worlds: Worlds) -> None:
    expected = train(kind, None)
    outcomes = worlds(world).run(train, kind, MESHES[world], world)
    if kind is EvaluatingForward:  # whose losses are of the rank's rows
        for outcome in outcomes:
            torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
    else:
        assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra, rtol=1e-5, atol=1e-6)


def test_a_rank_that_waits_says_so(worlds: Worlds) -> None:
    assert worlds(2).run(impatient, Late) == [("no error", 1), ("no error", 0)]


@pytest.mark.parametrize("kind", [ThenAStep, AveragesAlone])
def test_one_rank_alone_is_an_error(kind: type[Net], worlds: Worlds) -> None:
    first, second = worlds(2).run(impatient, kind, timeout_s=120)
    assert "test_outside_steps.py" in first[0]
    assert "every rank must make the same call" in first[0]
    assert "Error: " in second[0]
