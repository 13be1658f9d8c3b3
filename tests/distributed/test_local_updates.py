"""In a training the optimizer updates plain parts, and hooks and clipping before that see DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds


class Watched(Net):
    """Clipped; what the update and a hook before it are given is noted."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.1}

    def __init__(self) -> None:
        super().__init__()
        self.updated: list[str] = []
        self.hooked: list[str] = []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3)
        update = optimizer._init_group

        def watched(group, *args):
            self.updated.append(type(group["params"][0]).__name__)
            return update(group, *args)

        optimizer._init_group = watched
        return optimizer

    def on_before_optimizer_step(self, optimizer):
        self.hooked.append(type(optimizer.param_groups[0]["params"][0]).__name__)

    def extra(self) -> Any:
        return self.updated, self.hooked


class ByHand(Watched):
    """The same in manual optimization."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("kind", [Watched, ByHand])
def test_the_update_has_parts_and_what_comes_before_has_dtensors(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None)
    outcomes = worlds(2).run(train, kind, MESH, 2)
    for outcome in outcomes:
        assert outcome.extra == (["Tensor"] * 4, ["DTensor"] * 4)
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-4, atol=1e-5)
    if kind is Watched:
        assert_equals_one_device(outcomes, expected, tolerance=1e-4)
