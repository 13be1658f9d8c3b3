"""Whole numbers of a batch: positions of the rank's own rows, or of what has nothing to do with rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import FORWARD, STEP, Case, local_part


class _OwnRows(Case):
    """A collator numbers the rows of its batch."""

    modes = FORWARD
    oracle = "ddp"

    def collate(self, x, y, index):
        return {"x": x, "y": y, "own": self.numbers(len(x))}

    def numbers(self, rows):
        return torch.arange(rows)

    def local(self, batch, rank, shards):
        part = local_part({name: batch[name] for name in ("x", "y")}, rank, shards, self.rows)
        return {**part, "own": self.numbers(len(part["x"]))}


class NegativesInTheBatch(_OwnRows):
    """Each row's own partner is its class, those of all other rows are the others."""

    quick = pair = True

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        return F.cross_entropy(hidden @ hidden.detach().roll(1, 1).T, batch["own"])


class MixedPartners(_OwnRows):
    """Mixup with partners that the collator has chosen."""

    pair = True

    def numbers(self, rows):
        return torch.arange(rows).roll(1)

    def training_step(self, batch, batch_idx):
        partner = batch["own"].clamp(min=0)[:, None].squeeze(1)
        x, y = batch["x"], batch["y"]
        hidden = self.net(0.7 * x + 0.3 * x[partner])
        return 0.7 * F.cross_entropy(hidden, y) + 0.3 * F.cross_entropy(hidden, y[partner])


class AddedToOwnRows(_OwnRows):
    """Rows' values are added up where the collator says."""

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        added = torch.zeros_like(hidden).index_add(0, batch["own"] // 2, hidden)
        return added.square().mean() + F.cross_entropy(hidden, batch["y"])


class ChosenInTheStep(Case):
    """What the step sorts among all rows, and numbers itself, is as on one device."""

    modes = STEP
    pair = True

    def collate(self, x, y, index):
        return {"x": x, "y": y, "rank": torch.arange(len(x)).roll(3)}

    def training_step(self, batch, batch_idx):
        order = batch["rank"].argsort()
        hidden = self.net(batch["x"])
        partners = hidden[order] + hidden[torch.arange(len(order))]
        return F.cross_entropy(partners, batch["y"]) + hidden.gather(1, batch["y"][:, None]).mean()


class TokensOfATable(Case):
    """Tables, places in a row and classes do not grow with rows."""

    modes = STEP
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)

    def collate(self, x, y, index):
        tokens = (x.abs() * 10).long() % 8
        return {"tokens": tokens, "last": y % 3, "bank": y}

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["tokens"])
        last = hidden[torch.arange(len(hidden)), batch["last"]]
        tied = self.embed.weight[batch["bank"]]
        return F.cross_entropy(self.head(last + tied), batch["tokens"][:, 0])
