"""Parameters that Python code sets, or that it keeps in lists of its own, are the ones that train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn

from tests.distributed.jobs import MESH, Net, Outcome, train
from tests.numerics.training import full
from tests.support.worlds import Worlds


def assert_trains_alike(outcomes: list[Outcome], expected: Outcome) -> None:
    """Parameters are those of one device; a step in forward mode has the loss of its rank's rows."""
    for outcome in outcomes:
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcome.extra, expected.extra)


class Backbone(Net):
    """A frozen layer before the others, which trains from the second epoch on."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 6).requires_grad_(False)

    def loss(self, batch):
        x, y = batch
        return super().loss((self.backbone(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UnfrozenInStep(Backbone):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            for parameter in self.backbone.parameters():
                parameter.requires_grad = True
        return self.loss(batch)


class FrozenInStep(Net):
    epochs = 2

    def training_step(self, batch, batch_idx):
        for parameter in self.net[0].parameters():
            parameter.requires_grad = self.current_epoch == 1
        return self.loss(batch)


@pytest.mark.parametrize("kind", [UnfrozenInStep, FrozenInStep])
def test_a_step_that_assigns_requires_grad_is_heard(kind: type[Net], worlds: Worlds) -> None:
    assert_trains_alike(worlds(2).run(train, kind, MESH), train(kind, None))


class UnfrozenByList(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = list(self.backbone.parameters())

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            for parameter in self.frozen:
                parameter.requires_grad = True

    def extra(self):
        return [held is own for held, own in zip(self.frozen, self.backbone.parameters(), strict=True)]


class ClippedByList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.clipped = {"first": tuple(self.net[0].parameters()), "last": [*self.net[2].parameters()]}

    def on_before_optimizer_step(self, optimizer):
        for parameters in self.clipped.values():
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)


class RegularisedByList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.regularised = [self.net[0].weight, self.net[2].weight]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * sum(parameter.square().sum() for parameter in self.regularised)


class TiedByList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.tied = [self.net[0].weight]

    def loss(self, batch):
        x, y = batch
        return super().loss((F.linear(x, self.tied[0]), y))


class Average:
    """Of the weights, as many write it: it keeps the parameters, and follows them."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)
        self.averages = {parameter: parameter.detach().clone() for parameter in self.parameters}

    @torch.no_grad()
    def update(self) -> None:
        for parameter, average in self.averages.items():
            average.lerp_(full(parameter), 0.5)


class AveragedByObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.average = Average(self.net.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update()

    def extra(self):
        return list(self.average.averages.values())


class Clamp(Callback):
    def setup(self, trainer, pl_module, stage):
        self.weight, self.others = pl_module.net[0].weight, {pl_module.net[0].bias}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for parameter in (self.weight, *self.others):
            parameter.clamp_(-0.1, 0.1)


class ClampedByCallback(Net):
    def callbacks(self):
        return [Clamp()]


HELD = [
    UnfrozenByList,
    ClippedByList,
    RegularisedByList,
    TiedByList,
    AveragedByObject,
    ClampedByCallback,
]


@pytest.mark.parametrize("kind", HELD)
def test_parameters_that_were_taken_before_are_those_that_train(kind: type[Net], worlds: Worlds) -> None:
    assert_trains_alike(worlds(2).run(train, kind, MESH), train(kind, None))
