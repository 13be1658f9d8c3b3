"""Autograd functions of the user's, whose backward reads and writes Python state beside its ctx."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import EITHER, FORWARD, STEP, Case

SETTINGS = {"slope": 1.0, "fixed": 0.5}
CALLS: list[int] = []


class _Slope:
    value: ClassVar[float] = 1.0


class _Reversed(torch.autograd.Function):
    """Gradients are reversed, times a number."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return -SETTINGS["slope"] * gradient


class _OfClass(_Reversed):
    @staticmethod
    def backward(ctx, gradient):
        return -_Slope.value * gradient


class _Fixed(_Reversed):
    @staticmethod
    def backward(ctx, gradient):
        return -SETTINGS["fixed"] * gradient


class _Counted(_Reversed):
    @staticmethod
    def backward(ctx, gradient):
        CALLS.append(len(CALLS))
        return -0.5 * gradient


class _Inside(nn.Module):
    """Calls it within a module, which forward mode captures."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.first, self.second = function, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.function.apply(self.first(x)))


class _OwnBackward(Case):
    """`function` in the step, and in one of its modules; numbers change before each step."""

    function: ClassVar[type[torch.autograd.Function]]

    @classmethod
    def reset(cls):
        SETTINGS.update(slope=1.0, fixed=0.5)
        _Slope.value = 1.0
        CALLS.clear()

    def __init__(self):
        super().__init__()
        self.net = _Inside(self.function)

    def on_train_batch_start(self, batch, batch_idx):
        SETTINGS["slope"] = _Slope.value = 0.25 * (1 + self.global_step)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.function.apply(self.net(x)), y)


class ScheduledReversal(_OwnBackward):
    """A number of a dict in globals."""

    modes = FORWARD
    quick = pair = True
    function = _Reversed


class ScheduledByClass(_OwnBackward):
    """A number of a class, which is compared before each step."""

    modes = EITHER
    function = _OfClass


class FixedReversal(_OwnBackward):
    """A number that never changes: it stays the whole step, captured once."""

    modes = STEP
    captures = 1
    function = _Fixed

    def on_train_batch_start(self, batch, batch_idx):
        pass


class CountedBackwards(_OwnBackward):
    """It keeps what it was called with."""

    modes = FORWARD
    quick = True
    keeps = ("counted",)
    function = _Counted

    @property
    def counted(self):
        return len(CALLS)
