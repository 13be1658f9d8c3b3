"""What modules in the wild do with schedulers, loaders, callbacks, windows and function objects."""

from __future__ import annotations

import functools
from collections import deque

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn

from tests.semantics.base import Case


class SchedulerInStep(Case):
    """The step moves the scheduler on."""

    quick = True
    keeps = ("rates",)

    def __init__(self):
        super().__init__()
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return optimizer

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.schedule.step()
        self.rates.append(self.schedule.get_last_lr()[0])
        return loss


class StopsItself(Case):
    epochs = 4

    def training_step(self, batch, batch_idx):
        if self.global_step >= 4:
            self.trainer.should_stop = True
        return self.loss(batch)


class NormInBothModes(Case):
    """One layer in both modes; the other way round torch's own gradient is of statistics that changed since."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def training_step(self, batch, batch_idx):
        self.norm.train()
        moving = self.norm(self.net(batch[0]))
        self.norm.eval()
        return F.cross_entropy(moving + self.norm(self.net(batch[0])), batch[1])


class Window(Case):
    keeps = ("window",)

    def __init__(self):
        super().__init__()
        self.window = deque(maxlen=3)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.window.append(loss.detach())
        return loss * (1 + len(self.window))


class PartialChanged(Case):
    """Keywords of a partial that a hook changes."""

    quick = True

    def __init__(self):
        super().__init__()
        self.criterion = functools.partial(F.cross_entropy, label_smoothing=0.0)

    def on_train_epoch_end(self):
        self.criterion.keywords["label_smoothing"] = 0.3

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1])


class _Factor(Callback):
    def __init__(self) -> None:
        self.factor = 1.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.factor += 0.25


class FindsItsCallback(Case):
    def callbacks(self):
        return [_Factor()]

    def training_step(self, batch, batch_idx):
        callback = next(found for found in self.trainer.callbacks if isinstance(found, _Factor))
        return self.loss(batch) * callback.factor


class LengthsOfLoaders(Case):
    def training_step(self, batch, batch_idx):
        progress = batch_idx / len(self.trainer.train_dataloader)
        rest = 1 - self.global_step / self.trainer.estimated_stepping_batches
        return self.loss(batch) * (1 + progress) * rest * len(self.trainer.train_dataloader.dataset)


class StateOfOptimizer(Case):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + len(self.optimizers().state))


class LoggerOfTrainer(Case):
    """The logger by another way than `self.logger`."""

    def training_step(self, batch, batch_idx):
        self.trainer.logger.experiment.add_scalar("told", batch_idx + 1.0, self.global_step)
        return self.loss(batch)


class ListsInFunctions(Case):
    """A list read by functions in C."""

    def __init__(self):
        super().__init__()
        self.tags, self.weights = ["a"], [1.0]

    def on_train_epoch_end(self):
        self.tags.append("b")
        self.weights.append(3.0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * len(",".join(self.tags)) * max(tuple(self.weights)) * min([*self.weights])


class _Counting(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * (1 + self.calls * 0.1)


class CountsCalls(Case):
    """A submodule that counts its calls, from a number of its class on."""

    keeps = ("net.calls",)

    def __init__(self):
        super().__init__()
        self.net = _Counting(*self.net)


class Masks(Case):
    """Tensors kept by their size, until a hook throws them away."""

    def __init__(self):
        super().__init__()
        self.gain, self.masks = 1.0, {}

    def on_train_epoch_end(self):
        self.gain = 2.0
        self.masks.clear()

    def mask(self, size):
        if size not in self.masks:
            self.masks[size] = torch.full((size,), self.gain)
        return self.masks[size]

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) * self.mask(3), batch[1])
