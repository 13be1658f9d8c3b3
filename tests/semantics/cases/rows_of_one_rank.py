"""The rows of one rank as a number of the module's (``self.batch_size``), which steps divide by and count with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.semantics.base import STEP, Case


class _Counts(Case):
    def setup(self, stage):
        rows = self.rows // self.trainer.world_size
        self.save_hyperparameters({"batch_size": rows, "optimizer": {"bsz": rows}}, logger=False)
        self.batch_size = rows


class SumBesideMean(_Counts):
    """Of two terms only one is a sum."""

    quick = pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y, reduction="sum") / self.hparams.batch_size + logits.square().mean()


class SumBesidePenalty(_Counts):
    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        return F.cross_entropy(self.net(x), y, reduction="sum") / self.hparams["optimizer"]["bsz"] + 0.01 * penalty


class LoopOverRows(_Counts):
    """As many rows as one rank has."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = [F.cross_entropy(self.net(x[i : i + 1]), y[i : i + 1]) for i in range(self.batch_size)]
        return torch.stack(losses).mean()


class HardestHalf(_Counts):
    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none").topk(self.batch_size // 2)[0].mean()


class ValidatesBySums(_Counts):
    """A share of hits, which is at most 1."""

    pair = validates = True

    def validation_step(self, batch, batch_idx):
        x, y = batch
        hits = (self.net(x).argmax(1) == y).sum() / self.batch_size
        self.log("hits", hits, on_epoch=True, sync_dist=True, batch_size=self.batch_size)


class DividedByATensor(_Counts):
    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum") / torch.tensor(self.batch_size) + x.square().mean()


@dataclass(frozen=True, slots=True)
class Settings:
    """What nobody can set."""

    batch_size: int


class FrozenSettings(_Counts):
    pair = True

    def setup(self, stage):
        self.settings = Settings(self.rows // self.trainer.world_size)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum") / self.settings.batch_size + x.square().mean()


class LoggedBesideIt(_Counts):
    """What only says how much a logged value weighs changes nothing."""

    modes = STEP
    quick = pair = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + self.net(batch[0]).masked_fill(batch[0][:, :1] > 9, float("nan")).mean()
        self.log("loss", loss, batch_size=self.hparams.batch_size)
        self.log("other", loss * 2, batch_size=self.batch_size)
        return loss
