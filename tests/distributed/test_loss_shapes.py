"""Losses of one element that are no scalars, or are views of what the step logs or returns beside them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds


class OneElement(Net):
    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp", "capture": "step"}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch).reshape(1)
        self.log("loss", loss)
        return loss


class Matrix(OneElement):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp", "capture": "step"}

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch).reshape(1, 1), "count": 3}


class MeanOfRows(OneElement):
    def training_step(self, batch, batch_idx):
        losses = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.mean(0, keepdim=True)


class Picked(OneElement):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch).reshape(1)
        self.log("mean", loss.mean())
        self.log("loss", loss)
        return loss[0]


class Returned(OneElement):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch).reshape(1)
        return {"loss": loss, "detached": loss.detach(), "same": loss, "view": loss[0]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["loss"].shape == outputs["same"].shape == (1,)
        assert outputs["view"].shape == ()


@pytest.mark.parametrize("kind", [OneElement, Matrix, MeanOfRows, Picked, Returned])
def test_they_train_as_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None)
    for outcome in worlds(2).run(train, kind, MESH):
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-5, atol=1e-6)
