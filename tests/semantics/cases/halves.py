"""Rows that the loader puts into an order: halves of two kinds, episodes of several classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.semantics.base import FORWARD, STEP, Case, local_part


class _Ordered(Case):
    """Each rank's batch, as a collator of its own makes it, has the rows with an even number in front."""

    modes = FORWARD
    oracle = "ddp"

    def local(self, batch, rank, shards):
        x, y = local_part(batch, rank, shards, self.rows)
        return torch.cat([x[::2], x[1::2]]), torch.cat([y[::2], y[1::2]])


class LabelledAndUnlabelled(_Ordered):
    """The first half has labels, the second is to agree with its own noise."""

    quick = pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        labelled, unlabelled = self.net(x).chunk(2)
        loss = F.cross_entropy(labelled, y[: len(y) // 2])
        return loss + (unlabelled.softmax(-1) - labelled.detach().softmax(-1)).square().mean()


class Episodes(_Ordered):
    """Two classes of a few rows each, and how far their means lie apart."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        means = self.net(x).view(2, -1, 3).mean(1)
        return F.cross_entropy(self.net(x), y) - (means[0] - means[1]).square().mean() / 10


class ViewsJoinedInTheStep(Case):
    """Both views of each row are computed at once: halves that the step itself has made."""

    modes = STEP
    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        one, other = self.net(torch.cat([x, x * 0.9])).chunk(2)
        return F.cross_entropy(one, y) + (one - other).square().mean()


class OneRowEach(Case):
    """Loaders of one row, a bag of instances, which the step takes out."""

    pair = True
    rows = 2

    def training_step(self, batch, batch_idx):
        x, y = batch
        bag = self.net(x[0].view(2, 2).repeat(1, 2))  # instances of the bag
        return F.cross_entropy((bag * bag.softmax(0)).sum(0, keepdim=True), y[:1])
