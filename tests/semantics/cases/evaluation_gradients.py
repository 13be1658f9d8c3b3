"""Gradients of what it is given that an evaluation asks for, where its own Python runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from tests.semantics.base import Case


class _Asks(Case):
    validates = True
    epochs = 1
    trainer_options: ClassVar[Mapping[str, Any]] = {"inference_mode": False}


class Forces(_Asks):
    """Of an energy that depends on its input beside the network, too."""

    quick = pair = True

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.net(x).pow(2).sum() + 0.1 * x.pow(2).sum()
            force = -torch.autograd.grad(energy, x)[0]
        if force.abs().max().item() > 1e9:
            raise ValueError("it diverges")
        self.log("force", force.abs().mean(), sync_dist=True)


class Saliency(_Asks):
    """By a backward that reaches the input alone."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            F.cross_entropy(self.net(x), y, reduction="sum").backward(inputs=[x])
        self.log("saliency", x.grad.abs().mean(), sync_dist=True)
