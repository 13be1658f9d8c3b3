"""Modules that are no part of the LightningModule: a list hides them from torch, and their state is still read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import STEP, Case


class HiddenMode(Case):
    """A dropout of everything, which is on in the second epoch."""

    modes = STEP
    quick = pair = True
    captures = 2

    def __init__(self):
        super().__init__()
        self.extra = [nn.Dropout(1.0).eval()]

    def on_train_batch_start(self, batch, batch_idx):
        self.extra[0].train(self.current_epoch == 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.extra[0](self.net(x)), y)


class _HiddenTeacher(Case):
    """A frozen teacher, of which something is replaced when the second epoch begins."""

    modes = STEP
    captures = 2

    def __init__(self):
        super().__init__()
        self.teacher = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).requires_grad_(False)]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.replace(self.teacher[0])

    def replace(self, teacher):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        x = batch[0]
        with torch.no_grad():
            wanted = self.teacher[0](x).softmax(1)
        return F.cross_entropy(self.net(x), wanted)


class HiddenParameter(_HiddenTeacher):
    """One parameter."""

    quick = True

    def replace(self, teacher):
        teacher[0].weight = nn.Parameter(torch.full((6, 4), 0.5), requires_grad=False)


class HiddenNoBias(_HiddenTeacher):
    """One parameter, by nothing."""

    def replace(self, teacher):
        teacher[2].bias = None


class HiddenLayer(_HiddenTeacher):
    """One layer."""

    def replace(self, teacher):
        torch.manual_seed(5)
        teacher[0] = nn.Linear(4, 6).requires_grad_(False)


class HiddenGrown(_HiddenTeacher):
    """One layer more."""

    def replace(self, teacher):
        teacher.append(nn.Softplus(4.0))


class HiddenUnchanged(_HiddenTeacher):
    """Nothing: the step is captured once."""

    captures = 1

    def replace(self, teacher):
        pass
