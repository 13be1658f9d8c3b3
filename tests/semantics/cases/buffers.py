"""Buffers that hooks change between steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.semantics.base import Case


class CenterOfOwnRows(Case):
    """A buffer that a hook moves towards the rank's own rows: under DDP every step starts from rank 0's."""

    quick = pair = remembers = True

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        return {"loss": F.cross_entropy(z - self.center, y), "z": z}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.center.mul_(0.5).add_(outputs["z"].detach().mean(0), alpha=0.5)


class ReplacedCenter(CenterOfOwnRows):
    """Another tensor each time."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.center = 0.5 * self.center + 0.5 * outputs["z"].detach().mean(0)


class CenterLater(CenterOfOwnRows):
    """Ranks' values are equal at first."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch:
            super().on_train_batch_end(outputs, batch, batch_idx)
        else:
            self.center.add_(0.1)


class CommonCenter(Case):
    """A buffer that a hook changes alike on all ranks, and one of each rank's own that no step reads."""

    pair = True
    modes = ("step",)
    captures = 1

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def on_fit_start(self):
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x) - self.center, y)

    def on_train_batch_start(self, batch, batch_idx):
        self.center.data.mul_(0.5).add_(0.1 * torch.arange(3))
        self.seen.add_(batch[0].sum())

    def on_fit_end(self):
        del self.seen
