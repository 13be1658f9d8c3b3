"""Averages of the weights that lie nowhere on the module: made before it is sharded, and computed with what is."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.semantics.base import Case


class AverageByHand(Case):
    """Tensor by tensor, and how far the weights are from it."""

    quick = pair = True
    keeps = ("average", "distance")

    def __init__(self):
        super().__init__()
        self.average = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.distance = 0.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for average, parameter in zip(self.average, self.net.parameters(), strict=True):
                average.mul_(0.5).add_(parameter, alpha=0.5)
            pairs = zip(self.average, self.net.parameters(), strict=True)
            self.distance = float(sum((parameter - average).square().sum() for average, parameter in pairs))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1.0 + self.distance)


class AverageAtOnce(AverageByHand):
    """All tensors by one function."""

    keeps = ("average",)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch._foreach_lerp_(self.average, [parameter.detach() for parameter in self.net.parameters()], 0.5)


class AveragePutBack(AverageByHand):
    """The weights start each epoch from it."""

    def on_train_epoch_end(self):
        with torch.no_grad():
            for average, parameter in zip(self.average, self.net.parameters(), strict=True):
                parameter.copy_(average)


class WithGradients(AverageByHand):
    """Of gradients too, and what is read of them is written into them."""

    def on_before_optimizer_step(self, optimizer):
        for average, parameter in zip(self.average, self.net.parameters(), strict=True):
            parameter.grad.add_(average, alpha=0.1)
            parameter.grad.copy_(torch.where(average > 0, parameter.grad, -parameter.grad))


class AsOneVector(AverageByHand):
    """All weights flattened into one, as torch's own function does it, and put back from it."""

    keeps = ("vector",)

    def __init__(self):
        super().__init__()
        self.vector = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            vector = parameters_to_vector(self.net.parameters())
            self.vector = vector if self.vector is None else self.vector.lerp(vector, 0.5)
            vector_to_parameters(self.vector.clone(), self.net.parameters())


class WrittenThroughViews(AverageByHand):
    """What is written into views of weights, rows that two ranks cannot share evenly among them, is in the weights."""

    keeps = ("average", "first")

    def __init__(self):
        super().__init__()
        self.first = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            flats = []
            for average, parameter in zip(self.average, self.net.parameters(), strict=True):
                parameter.view_as(average).mul_(0.9)
                flats.append(parameter.data.view(-1))
                flats[-1][:2] = 0.25
                average.copy_(parameter)
            self.first = [float(parameter.sum()) for parameter in self.net.parameters()]
            flats[2].clamp_(-0.1, 0.1)  # nothing reads it before the hook ends


class _Averaging(Callback):
    """Keeps the average in a tensor of its own."""

    def __init__(self) -> None:
        self.flat: Tensor | None = None

    def setup(self, trainer, pl_module, stage):
        self.flat = torch.zeros(sum(parameter.numel() for parameter in pl_module.parameters()))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        at = 0
        with torch.no_grad():
            for parameter in pl_module.parameters():
                count = parameter.numel()
                part = self.flat[at : at + count]
                part.copy_(torch.lerp(part, parameter.flatten(), 0.25))
                at += count
        pl_module.total = float(self.flat.sum())


class AverageOfACallback(Case):
    """A callback's, in one flat tensor."""

    keeps = ("total",)

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def configure_callbacks(self):
        return [_Averaging()]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1.0 + self.total)
