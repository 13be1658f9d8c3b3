"""Parameters that Python code freezes and unfreezes are the ones that train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.jobs import MESH, Net, Outcome, train
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
