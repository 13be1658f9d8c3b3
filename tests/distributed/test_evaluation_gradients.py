"""Gradients by parameters that an evaluation asks for where its own Python runs: those of the rows of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_autoparallel.pipeline.local_calls import records_gradients
from tests.distributed.jobs import MESH, Validated, assert_equals_one_device, train
from tests.support.worlds import Worlds


class NormOfGradients(Validated):
    """It reads the norm, so that it is not captured whole; the step after it trains on."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"inference_mode": False, "max_epochs": 2}

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = self.loss(batch)
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        norm = sum(gradient.pow(2).sum() for gradient in gradients) ** 0.5
        if norm.item() < 0:
            raise ValueError("no norm")
        self.log("norm", norm)


class NormWhileAccumulating(NormOfGradients):
    """Gradients of training wait for their reduction meanwhile."""

    trainer_options: ClassVar[Mapping[str, Any]] = {
        **NormOfGradients.trainer_options,
        "accumulate_grad_batches": 4,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
    }


class Replicated(NormOfGradients):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class Found(NormOfGradients):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto"}


@pytest.mark.parametrize("kind", [NormOfGradients, NormWhileAccumulating, Replicated, Found])
def test_they_are_those_of_one_device(kind: type[Validated], worlds: Worlds) -> None:
    expected = train(kind, None)
    assert expected.metrics["norm"] > 0
    assert_equals_one_device(worlds(2).run(train, kind, MESH), expected)


def test_nothing_is_recorded_in_inference_mode() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert records_gradients(layer, [x])
    with torch.inference_mode(), torch.enable_grad():
        assert not records_gradients(layer, [x])
