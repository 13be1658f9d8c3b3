"""Tensors that hooks change in ways that torch's count of changes in place says nothing of."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.semantics.base import Case
from tests.semantics.cases import buffers


class CodesOfOwnRows(Case):
    """Buffers that each rank moves by its own rows, in a step that reads a value: DDP sends those of rank 0."""

    pair = True

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))
        self.array = np.zeros(3, dtype=np.float32)
        self.register_buffer("shift", torch.from_numpy(self.array))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        loss = F.cross_entropy(z - self.codes - self.shift, y)
        self.last = loss.item()
        return {"loss": loss, "z": z}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        mean = outputs["z"].detach().mean(0)
        self.codes.data.mul_(0.5).add_(mean, alpha=0.25)
        self.array += 0.1 * mean.numpy()


class CenterOfOwnRows(buffers.CenterOfOwnRows):
    """A buffer in a step that is captured whole as long as ranks agree."""

    quick = False

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step >= 2:
            self.center.data.mul_(0.5).add_(outputs["z"].detach().mean(0), alpha=0.5)


class ShiftOfOwnRows(CenterOfOwnRows):
    """The same tensor as an attribute, which each rank has for itself."""

    def __init__(self):
        super().__init__()
        del self.center
        self.center = torch.zeros(3)


class ReadThroughData(Case):
    """A rate whose value the step reads."""

    quick = pair = True

    def __init__(self):
        super().__init__()
        self.array = np.ones(2, dtype=np.float32)
        self.alpha = torch.from_numpy(self.array)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.alpha.tolist()[0]

    def on_train_epoch_end(self):
        self.alpha.data.mul_(0.5)


class ReadThroughNumpy(ReadThroughData):
    def on_train_epoch_end(self):
        self.array *= 0.5
