"""Ranks start from one state, rank 0's, whatever each of them made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds


class UnequalBuffers(Net):
    """Buffers of several kinds whose values follow the rank; one is changed by the step."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.fill_(rank)
        self.register_buffer("scale", torch.full((6,), 1.0 + rank))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("short", torch.full((2, 3), rank, dtype=torch.int16).t())
        self.register_buffer("empty", torch.empty(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.where(self.flag, self.norm(x) * self.scale, 0) + self.short.sum()
        return self.loss((x, y))

    def extra(self):
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def test_buffers_are_rank_zeros(worlds: Worlds) -> None:
    expected = train(UnequalBuffers, None)
    ranks = worlds(2).run(train, UnequalBuffers, MESH)
    assert_equals_one_device(ranks, expected)
    for outcome in ranks:
        torch.testing.assert_close(outcome.extra, expected.extra)


class MadeBefore(Net):
    """Optimizer and scheduler are made with the module; one parameter is tied, and has a group of its own."""

    made = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 10)
        self.again.weight = self.net[0].weight
        weight = [self.net[0].weight]
        others = [p for p in self.parameters() if p is not self.net[0].weight]
        self.optimizer = self.made([{"params": weight, "lr": 0.03}, {"params": others}], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def loss(self, batch):
        return super().loss(batch) + self.again(batch[0]).square().mean()

    def configure_optimizers(self):
        return {
            "optimizer": self.optimizer,
            "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"},
        }


class SteppedBefore(MadeBefore):
    def __init__(self) -> None:
        super().__init__()
        super().loss(self.batches()[0]).backward()
        self.optimizer.step()


def test_an_optimizer_made_before_fit_trains(worlds: Worlds) -> None:
    ranks = worlds(2).run(train, MadeBefore, MESH)
    assert_equals_one_device(ranks, train(MadeBefore, None))


def test_an_optimizer_with_state_keeps_it(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, SteppedBefore, MESH), train(SteppedBefore, None))


class LoadsStates(Net):
    """Whole states of one device, which user code loads where ``loads`` says."""

    loads: ClassVar[str] = "configure_optimizers"
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "compile": False}
    epochs = 2

    def configure_optimizers(self):
        optimizer = self.made()
        self.load("configure_optimizers", optimizer)
        return optimizer

    def made(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3)

    def load(self, place: str, optimizer: Any) -> None:
        if place != self.loads:
            return
        shapes = [parameter.shape for parameter in self.parameters()]
        moments = {
            number: {name: torch.linspace(0.1, 0.5, shape.numel()).reshape(shape) for name in ("exp_avg", "exp_avg_sq")}
            for number, shape in enumerate(shapes)
        }
        state = {number: {"step": torch.tensor(3.0), **values} for number, values in moments.items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def on_train_start(self):
        self.load("on_train_start", self.optimizers())

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.load("on_train_epoch_start", self.trainer.optimizers[0])


class LoadsStatesAtTheStart(LoadsStates):
    loads = "on_train_start"


class LoadsStatesLater(LoadsStates):
    loads = "on_train_epoch_start"


class LoadsStatesOfCopies(LoadsStatesLater):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp", "compile": False}


@pytest.mark.parametrize("kind", [LoadsStates, LoadsStatesAtTheStart, LoadsStatesLater, LoadsStatesOfCopies])
def test_states_that_user_code_loads_are_cut(kind: type[Net], worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, MESH), train(kind, None))
