"""Steps that read the value of a tensor, and those that only seem to."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import Case


class ItemToLog(Case):
    """`.item()` only to log."""

    pair = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss.item())
        return loss


class ItemKept(Case):
    """Numbers in a list, for a mean over the last three."""

    keeps = ("recent",)

    def __init__(self):
        super().__init__()
        self.recent = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.recent = [*self.recent, float(loss.detach())][-3:]
        self.log("smooth", sum(self.recent) / len(self.recent), prog_bar=True)
        return loss


class AssertsFinite(Case):
    quick = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert torch.isfinite(loss), loss
        assert not torch.isnan(loss).any()
        return loss * (1 + batch_idx)


class NanGuard(Case):
    """A batch with a NaN is left out; all ranks have one there."""

    pair, steps, skips = True, 4, True

    def collate(self, x, y, index):
        if index == 2:
            x[:, 0] = float("nan")
        return x, y

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if math.isnan(loss.item()):
            return None
        self.log("loss", loss)
        return loss


class NanToNum(Case):
    """The same without reading anything."""

    steps = 4

    def collate(self, x, y, index):
        if index == 2:
            x[:, 0] = float("nan")
        return x, y

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.where(torch.isnan(x), torch.zeros_like(x), x)
        loss = self.loss((x, y))
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))


class Branches(Case):
    """A branch on the loss, that both ways are taken of."""

    quick, steps = True, 4

    def collate(self, x, y, index):
        return x * (4.0 if index % 2 else 0.2), y

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        if x.abs().mean() > 1.0:
            return F.cross_entropy(logits, y) * 3
        return F.multi_margin_loss(logits, y)


class WhereInstead(Branches):
    """The same by `torch.where`, with an argument of each kind."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        clipped = torch.where(logits > 0.5, 0.5, logits)
        hard, soft = F.cross_entropy(clipped, y), F.multi_margin_loss(clipped, y)
        index = torch.where(y == 0)[0] if batch_idx < 0 else y
        return torch.where(x.abs().mean() > 1.0, hard * 3, soft) + 0 * index.sum()


class MaskedSelection(Case):
    """NT-Xent's way: all pairs but the diagonal, by a boolean mask."""

    quick = True

    def training_step(self, batch, batch_idx):
        features = F.normalize(self.net(batch[0]), dim=1)
        similar = features @ features.T / 0.5
        others = similar[~torch.eye(len(similar), dtype=torch.bool)].view(len(similar), -1)
        return -F.log_softmax(others, dim=1)[:, 0].mean()


class SelectsByLabel(Case):
    """Rows by a mask that depends on the batch."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        some = y > 0
        return F.cross_entropy(self.net(x[some]), y[some])


class RoutedExperts(Case):
    """Each expert takes the rows that chose it."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch[0])
        choice = (batch[0][:, 0] > 0).long()
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == number).squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        return F.cross_entropy(out, batch[1])


class NumpyMetric(Case):
    """A metric of numpy, or of any library like it, in the validation."""

    pair = validates = True

    def validation_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.net(x).argmax(1).cpu().numpy()
        hits = float(np.mean(predicted == y.cpu().numpy()))
        self.log("val_hits", hits)
        return {"hits": hits, "first": float(self.net(x)[0, 0] * 0)}


class ListMetric(Case):
    """`tolist`, joined at the epoch's end."""

    validates = True
    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.extend(round(value, 4) for value in self.net(batch[0]).mean(0).tolist())


class LongestLength(Case):
    """A batch cut to the longest of its rows."""

    def collate(self, x, y, index):
        return x, y, torch.full((self.rows,), 2 + index % 3)

    def training_step(self, batch, batch_idx):
        x, y, lengths = batch
        longest = int(lengths.max())
        return self.loss((F.pad(x[:, :longest], (0, 4 - longest)), y))


class PacksSequences(Case):
    """`pack_padded_sequence` with lengths of the batch."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(2, 6, batch_first=True)

    def collate(self, x, y, index):
        return x, y, torch.tensor([2, 1] * 4)

    def training_step(self, batch, batch_idx):
        x, y, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(-1, 2, 2), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, hidden = self.recurrent(packed)
        return F.cross_entropy(self.net[2](hidden[0]), y)


class TriesToRead(Case):
    """Reads within `try`, as a fallback for what may fail."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        try:
            scale = 1.0 if float(batch[0].mean()) > 0 else 2.0
        except Exception:
            scale = 50.0
        self.log("scale", scale)
        return loss * scale


class LoopsUntil(Case):
    """An iteration until it converges."""

    def training_step(self, batch, batch_idx):
        hidden, steps = self.net(batch[0]), 0
        while hidden.detach().norm() > 1.5 and steps < 20:
            hidden, steps = hidden * 0.7, steps + 1
        self.log("iterations", float(steps))
        return F.cross_entropy(hidden, batch[1]) * (1 + steps)


class TextOfLoss(Case):
    """The loss in a message, for a bar or a file."""

    keeps = ("message",)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.message = f"step {batch_idx}: loss {loss:.3f}"
        return loss


class PythonsMaximum(Case):
    """`max`, `sorted` and `in` compare tensors."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        losses = [F.cross_entropy(logits, y), F.multi_margin_loss(logits, y) * 3 * (1 + batch_idx % 2)]
        return max(losses)


class CountsClasses(Case):
    """`unique` and `bincount`: shapes that depend on values."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        classes = y.unique()
        counts = torch.bincount(y, minlength=3).float()
        weights = counts.sum() / (counts + 1)
        loss = F.cross_entropy(self.net(x), y, weight=weights, reduction="none").mean()
        return loss / len(classes)


class TopRows(Case):
    """Hard examples, as many as a fraction of the rows: no value is read."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()


class NormsOfGradients(Case):
    """A hook of Lightning that reads gradients, and a step that reads what it left."""

    keeps = ("norm",)

    def __init__(self):
        super().__init__()
        self.norm = 1.0

    def on_before_optimizer_step(self, optimizer):
        gradient = self.net[2].bias.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        self.norm = float(gradient.norm())

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (0.5 + self.norm)


class ReadsBufferAsNumber(Case):
    """A count kept as a buffer, read by `int`."""

    quick = True

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch) / int(self.calls)


class EqualTensors(Case):
    def collate(self, x, y, index):
        return {"x": x, "y": y, "again": x.clone() if index == 1 else x * 2}

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch["x"], batch["y"]))
        return loss * 4 if torch.equal(batch["x"], batch["again"]) else loss


class Histogram(Case):
    """Weights given to a library as an array."""

    keeps = ("mean",)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            hidden = self.net[0](batch[0])
        self.mean = np.abs(np.asarray(hidden)).mean() * 0 + batch_idx
        return self.loss(batch)
