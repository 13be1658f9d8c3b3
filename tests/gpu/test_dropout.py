"""Dropout on a GPU: new masks at every step, at the rate that was asked for, and a backward that agrees with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.jobs import make_strategy, make_trainer

pytestmark = pytest.mark.gpu

RATE, STEPS, ROWS, LENGTH, WIDTH = 0.25, 4, 8, 32, 64


class Attending(LightningModule):
    """Dropout of values, then within attention whose values are ones: what it gives is the share that was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.kept: list[Tensor] = []
        self.attended: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        kept = F.dropout(self.weight.expand_as(batch), RATE)
        heads = batch.view(ROWS, LENGTH, 4, 16).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, torch.ones_like(heads), dropout_p=RATE)
        loss = kept.sum() + 0.0 * attended.sum()
        return {"loss": loss, "kept": kept.detach(), "attended": attended.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(outputs["kept"].cpu())
        self.attended.append(outputs["attended"].cpu())

    def on_before_optimizer_step(self, optimizer):
        gradient = self.weight.grad
        self.gradients.append(gradient.full_tensor().cpu() if hasattr(gradient, "full_tensor") else gradient.cpu())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        return DataLoader(
            [torch.randn(ROWS, LENGTH, WIDTH, generator=generator) for _ in range(STEPS)], batch_size=None
        )


def drawn(ours: bool, compiled: bool, accelerator: str) -> Any:
    """What each step kept, what its attention gave, and the weights' gradients."""
    torch.manual_seed(0)
    module = Attending()
    strategy = make_strategy({"dp_shard": 1}, {"compile": compiled}) if ours else None
    trainer = make_trainer(strategy, 1, accelerator=accelerator)
    trainer.fit(module)
    modes = strategy.modes if strategy is not None else {}
    return module.kept, module.attended, module.gradients, modes


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_masks_are_new_and_at_their_rate(compiled: bool, accelerator: str, gpu_world):
    kept, attended, gradients, modes = gpu_world().run(drawn, True, compiled, accelerator)[0]
    assert modes == {"training_step": "step"}
    assert len(kept) == STEPS
    for step, (values, heads, gradient) in enumerate(zip(kept, attended, gradients, strict=True)):
        assert (values == 0).float().mean().item() == pytest.approx(RATE, abs=0.02), step
        torch.testing.assert_close(values[values != 0], torch.full_like(values[values != 0], 1 / (1 - RATE)))
        torch.testing.assert_close(
            gradient, values.sum((0, 1)), rtol=1e-5, atol=0
        )  # the backward's mask is the forward's
        assert heads.mean().item() == pytest.approx(1.0, abs=0.06), step  # kept weights are scaled up: five deviations
        assert heads.std().item() > 0.01, step  # of ones, attention without dropout gives ones
    for seen in (kept, attended):
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))
