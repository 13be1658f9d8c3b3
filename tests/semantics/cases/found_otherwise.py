"""Objects that a step finds by other ways than its module's attributes, and that change between steps."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from torch import nn

from tests.semantics.base import STEP, Case


class Schedule:
    """Of the user's, with a number that hooks change."""

    current: ClassVar[Schedule]

    def __init__(self):
        self.scale, self.calls = 0.5, 0

    def at(self) -> float:
        return self.scale

    def summed(self) -> float:
        return sum(self.scale * weight for weight in (0.5, 0.25))

    def on_forward(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * self.scale


Schedule.current = Schedule()
LOCAL = threading.local()


class _Scheduled(Case):
    """`schedule` is found as each case has it, and doubled after each step."""

    modes = STEP

    def schedule(self) -> Schedule:
        raise NotImplementedError

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule().scale *= 2


class BoundMethod(_Scheduled):
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.at, self.summed = Schedule().at, Schedule().summed

    def schedule(self):
        return self.at.__self__

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.summed.__self__.scale += 1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.at() * self.summed()


class HookOfAnObject(_Scheduled):
    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(Schedule().on_forward)

    def schedule(self):
        return next(iter(self.net[0]._forward_hooks.values())).__self__


class OnAClass(_Scheduled):
    quick = pair = True

    @classmethod
    def reset(cls):
        Schedule.current = Schedule()

    def schedule(self):
        return Schedule.current

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * Schedule.current.scale


class OfTheThread(_Scheduled):
    """Met where an inner function closes over it; what it counts there happens at each step."""

    keeps = ("calls",)
    modes = Case.modes

    @classmethod
    def reset(cls):
        LOCAL.schedule = Schedule()

    def schedule(self):
        return LOCAL.schedule

    @property
    def calls(self):
        return LOCAL.schedule.calls

    def training_step(self, batch, batch_idx):
        schedule = LOCAL.schedule

        def scaled(weight: float) -> float:
            schedule.calls += 1
            return schedule.scale * weight

        return self.loss(batch) * sum(scaled(weight) for weight in (0.5, 0.25))


def cell_of(value: float):
    def put(other: float) -> None:
        nonlocal value
        value = other

    return (lambda: value), put


class KeptPair(Case):
    """Two functions over one variable, made in the first step: a hook puts what the step gets."""

    modes = STEP
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.pair = None

    def training_step(self, batch, batch_idx):
        if self.pair is None:
            self.pair = cell_of(1.0)
        return self.loss(batch) * self.pair[0]()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.pair[1](1.0 + batch_idx)

    def on_train_end(self):
        self.pair = None  # local functions cannot be compared


class KeptWhereItIsMade(KeptPair):
    """Made by the step itself, whose variable of that name is what the kept one's was at first."""

    modes = Case.modes
    quick = pair = False

    def training_step(self, batch, batch_idx):
        value = 1.0

        def put(other):
            nonlocal value
            value = other

        def get():
            return value

        if self.pair is None:
            self.pair = get, put
        return self.loss(batch) * self.pair[0]()


class KeptOverTensor(Case):
    """A function kept from the beginning has the first tensor, whatever the module's attribute is later."""

    def __init__(self):
        super().__init__()
        self.kept = None
        self.w = torch.tensor(1.0)
        self.kept = self.made(self.w)

    def made(self, w: torch.Tensor):
        def scaled(loss):
            return loss * w

        return self.kept or scaled

    def training_step(self, batch, batch_idx):
        return self.made(self.w)(self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.w = self.w + 1

    def on_train_end(self):
        self.kept = None


def scaled_by(table: dict[str, float]):
    def scaled(loss: torch.Tensor) -> torch.Tensor:
        return loss * table["scale"]

    return scaled


class FactoryGivenADict(Case):
    modes = STEP
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.table = {"scale": 0.5}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.table["scale"] += 0.5

    def training_step(self, batch, batch_idx):
        return scaled_by(self.table)(self.loss(batch))
