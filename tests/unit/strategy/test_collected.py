"""Which evaluations collect rows by themselves, told from their code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_autoparallel.strategy.collected import collects


class Base(LightningModule):
    """Counts by what is counted for it."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.names = torchmetrics.SumMetric(), set()
        self.seen: list[Any] = []

    def validation_step(self, batch, batch_idx):
        mine = []
        mine.append(batch)
        self.metric.update(batch)
        self.log("sum", self.metric)
        self.last = batch
        self.batches = 0
        self.batches += 1


class Appends(Base):
    def validation_step(self, batch, batch_idx):
        self.seen.append(batch)


class ByHelper(Base):
    def validation_step(self, batch, batch_idx):
        self._keep(batch)

    def _keep(self, batch):
        self.right += batch.sum()


class BySuper(Appends):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx)


class InHook(Base):
    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen[batch_idx] = outputs


class Joins(Base):
    def validation_step(self, batch, batch_idx):
        self.seen = torch.cat([self.seen, batch])


class AddsNames(Base):
    def validation_step(self, batch, batch_idx):
        self.names.add(batch)


class InTest(Base):
    def test_step(self, batch, batch_idx):
        self.seen.append(batch)


class KeepsInModule(Callback):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        pl_module.seen.extend(outputs)


def told(module: LightningModule, *callbacks: Callback) -> bool:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[*callbacks], enable_checkpointing=False)
    trainer.strategy.connect(module)
    return collects(trainer)


@pytest.mark.parametrize("kind", [Appends, ByHelper, BySuper, InHook, Joins, AddsNames])
def test_what_grows_is_collected(kind: type[Base]) -> None:
    assert told(kind())


@pytest.mark.parametrize("kind", [Base, InTest])
def test_metrics_and_what_is_replaced_are_not(kind: type[Base]) -> None:
    assert not told(kind())


def test_callbacks_collect_in_the_module() -> None:
    assert told(Base(), KeepsInModule())
