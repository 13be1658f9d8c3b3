"""Steps that compute with counters and other numbers."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from tests.semantics.base import STEP, Case


class GlobalStepOverThousand(Case):
    quick, captures, steps = True, 1, 4
    modes = STEP

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * ((self.global_step + 1) / 1000)


class Annealed(Case):
    """KL annealing: a factor that grows up to one."""

    pair, captures, steps = True, 2, 4
    modes = STEP

    def training_step(self, batch, batch_idx):
        factor = min(1.0, self.global_step / 5)
        self.log("factor", factor)
        return self.loss(batch) + factor * self.net[0].weight.square().mean()


class CosineOfProgress(Case):
    captures, steps = 1, 4
    modes = STEP

    def training_step(self, batch, batch_idx):
        factor = 0.5 * (1 + math.cos(math.pi * self.global_step / 8))
        self.log("factor", factor)
        return self.loss(batch) * factor


class NegatedIndex(Case):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * 2 ** (-batch_idx)


class IndexAsTensor(Case):
    def training_step(self, batch, batch_idx):
        index = torch.tensor(batch_idx)
        self.log("index", index.float())
        return self.loss(batch) / (1 + index)


class EpochAsFloat(Case):
    """Ten epochs, each with a number of its own."""

    pair, epochs, steps = True, 10, 1

    def training_step(self, batch, batch_idx):
        epoch = float(self.current_epoch)
        self.log("epoch_number", epoch)
        return self.loss(batch) / (1 + epoch)


class TenEpochsByInt(Case):
    """A table by epochs, longer than what captures may be."""

    epochs, steps = 10, 1

    def __init__(self):
        super().__init__()
        self.table = [1 / (i + 1) for i in range(10)]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.table[self.current_epoch]


class IndexByAnotherName(Case):
    pair = True

    def training_step(self, batch, number):
        return self.loss(batch) * (1 + number)


class IndexByStar(Case):
    def training_step(self, *args):
        batch, index = args
        return self.loss(batch) * (1 + index)


class Arithmetic(Case):
    """Floor, remainder, powers, rounding, division both ways."""

    steps = 4

    def training_step(self, batch, batch_idx):
        i = self.global_step
        factor = 1 + i // 3 + i % 3 + i**2 / 10 + round(i / 7, 1) + abs(i - 4) + divmod(i, 4)[1] + math.floor(i / 2)
        return self.loss(batch) / factor


class IntegerArithmetic(Case):
    """Classes shifted by a counter: a tensor of integers stays one."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        shifted = (y + self.global_step) % 3
        assert shifted.dtype == torch.int64
        return self.loss((x, shifted))


class FilledTensor(Case):
    def training_step(self, batch, batch_idx):
        level = torch.full((3,), float(batch_idx + 1))
        more = batch[0].new_tensor([self.global_step, 1.0]).mean()
        filled = torch.zeros(1).fill_(self.current_epoch)
        return self.loss(batch) * level.mean() + (more + filled.squeeze()) * self.net[2].bias.sum()


class TensorTable(Case):
    """A schedule in a tensor, indexed by a counter."""

    quick = True

    def __init__(self):
        super().__init__()
        self.register_buffer("betas", torch.linspace(0.1, 2.0, 12))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.betas[self.global_step]


class ListTable(Case):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * [1.0, 0.5, 2.0][batch_idx]


class SliceByIndex(Case):
    def training_step(self, batch, batch_idx):
        x, y = batch
        width = batch_idx + 2
        return self.loss((F.pad(x[:, :width], (0, 4 - width)), y))


class LoopByEpoch(Case):
    epochs, steps = 3, 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for _ in range(self.current_epoch):
            loss = loss + self.loss(batch) * 0.5
        return loss


class LabelSmoothing(Case):
    """A Python argument of an operator that falls with the steps."""

    quick = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, label_smoothing=max(0.0, 0.3 - 0.05 * self.global_step))


class LabelSmoothingByModule(Case):
    """The same, kept by a loss module that a hook changes."""

    def __init__(self):
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.5)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.criterion.label_smoothing *= 0.5

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1])


class Temperature(Case):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x) / (1 + self.global_step), y)


class NumpyOfCounter(Case):
    def training_step(self, batch, batch_idx):
        factor = np.interp(self.global_step, [0, 4], [0.1, 1.0])
        return self.loss(batch) * float(np.exp(-np.float64(self.current_epoch))) * factor


class LogsNamedByParity(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log(f"loss_{batch_idx % 2}", loss)
        return loss


class LogsNamedByIndex(Case):
    """A name for each batch of the epoch, which once could not be."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log(f"loss_{batch_idx}", loss)
        return loss


class LogsNumbers(Case):
    """Numbers of all kinds, by every way of logging."""

    pair = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("step_number", self.global_step + 0.5, on_step=True, on_epoch=True)
        self.log_dict({"index": float(batch_idx), "twice": 2.0 * self.global_step}, on_epoch=True)
        self.log("weighed", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("summed", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=sum)
        return loss


class LogsSometimes(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.global_step % 2:
            self.log("odd", loss)
        return loss


class LogsAcrossRanks(Case):
    """`sync_dist` reduces what is logged over ranks, under DDP as on one device."""

    quick = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("mean", loss, sync_dist=True, on_epoch=True)
        self.log("number", float(self.global_step), sync_dist=True)
        return loss


class ExponentOfStep(Case):
    """A decay by repeated products: `0.9 ** step`."""

    captures, steps = 1, 4
    modes = STEP

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * 0.9**self.global_step


class ComparedToTensor(Case):
    """A counter on the other side of a comparison with a tensor."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        weights = (torch.arange(3) < self.global_step + 1).float() + 0.1
        return F.cross_entropy(self.net(x), y, weight=weights, reduction="none").mean()
