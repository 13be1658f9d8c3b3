"""Totals over rows that hooks see: what they join over ranks must be each rank's own, as it is under DDP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.semantics.base import Case


class _Validates(Case):
    validates = True
    epochs = 1

    def on_validation_epoch_start(self):
        self.outs = []

    def _found(self, batch):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(), y


class SumsSynced(_Validates):
    """Kept in a list, logged with `sync_dist`."""

    quick = pair = True

    def validation_step(self, batch, batch_idx):
        loss, hits, y = self._found(batch)
        self.outs.append({"loss": loss, "hits": hits, "rows": len(y)})

    def on_validation_epoch_end(self):
        for name in ("loss", "hits", "rows"):
            total = torch.as_tensor(sum(out[name] for out in self.outs)).float()
            self.log(name, total, sync_dist=True, reduce_fx="sum")


class SumsGathered(SumsSynced):
    """Joined by `all_gather`, one by the other."""

    quick = pair = False

    def on_validation_epoch_end(self):
        hits = self.all_gather(torch.stack([out["hits"] for out in self.outs])).sum()
        rows = self.all_gather(torch.tensor(sum(out["rows"] for out in self.outs))).sum()
        self.log("accuracy", hits / rows)


class SumsFromZero(_Validates):
    """Added up in numbers that Python begins with, by hand."""

    quick = True

    def on_validation_epoch_start(self):
        self.hits, self.rows, self.loss = 0, 0, 1e-8

    def validation_step(self, batch, batch_idx):
        loss, hits, y = self._found(batch)
        self.hits += hits
        self.rows += len(y)
        self.loss = self.loss + loss

    def on_validation_epoch_end(self):
        hits, rows, loss = (self.all_gather(value).sum() for value in (self.hits, self.rows, self.loss))
        self.log("accuracy", hits / rows)
        self.log("loss", loss / rows)


class CountsAndMore(_Validates):
    """A number that is no multiple of the rows."""

    def validation_step(self, batch, batch_idx):
        self.outs.append(len(batch[1]) + 1.5)

    def on_validation_epoch_end(self):
        self.log("rows", self.all_gather(torch.tensor(sum(rows - 1.5 for rows in self.outs))).sum())


class SumsOfParts(_Validates):
    """Of which only a part grows with the rows."""

    def validation_step(self, batch, batch_idx):
        loss, _, y = self._found(batch)
        self.outs.append(torch.stack([loss + 0 * self.net[0].weight.sum(), loss / len(y)]))

    def on_validation_epoch_end(self):
        every = self.all_gather(torch.stack(self.outs)).reshape(-1, 2)
        self.log("total", every[:, 0].sum())
        self.log("mean", every[:, 1].mean())


class SumsOverRows(_Validates):
    """A total beside rows, of which there are as many as the rank has."""

    def validation_step(self, batch, batch_idx):
        loss, _, y = self._found(batch)
        self.outs.append((loss, y))

    def on_validation_epoch_end(self):
        rows = torch.cat([y for _, y in self.outs])
        self.log("loss", sum(loss for loss, _ in self.outs) / len(rows), sync_dist=True)


class SumsReturned(_Validates):
    def validation_step(self, batch, batch_idx):
        return {"sum": self._found(batch)[0]}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.outs.append(outputs["sum"] / len(batch[1]))

    def on_validation_epoch_end(self):
        self.log("loss", torch.stack(self.outs).mean(), sync_dist=True)


class SumsInBuffers(_Validates):
    """Counted in buffers, from which evaluation counts on each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hits", torch.zeros(()), persistent=False)
        self.register_buffer("size", torch.zeros(()), persistent=False)

    def on_validation_epoch_start(self):
        self.hits.zero_()
        self.size.zero_()

    def validation_step(self, batch, batch_idx):
        self.hits += self._found(batch)[1]
        self.size += batch[0].abs().sum()

    def on_validation_epoch_end(self):
        self.log("hits", self.hits.clone(), sync_dist=True, reduce_fx="sum")
        self.log("size", self.trainer.strategy.reduce(self.size.clone(), reduce_op="sum"))
        self.hits.zero_()
        self.size.zero_()


class CountsBecomeWeights(Case):
    """Classes counted in an epoch's steps weight the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = []
        self.register_buffer("weights", torch.ones(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.counts.append(F.one_hot(y, 3).sum(0))
        return (self.weights[y] * F.cross_entropy(self.net(x), y, reduction="none")).mean()

    def on_train_epoch_end(self):
        counts = self.all_gather(torch.stack(self.counts)).reshape(-1, 3).sum(0)
        self.weights.copy_(counts / counts.sum())
        self.counts.clear()


class MeansStayWhole(_Validates):
    """A mean is the same joined or not: nothing speaks against the whole step."""

    modes = ("step",)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen = loss.detach()
        return {"loss": loss, "hits": (self.net(batch[0]).argmax(1) == batch[1]).float().mean()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", self.all_gather(self.seen).mean())
        self.log("hits", outputs["hits"], sync_dist=True)


class DividedByOneRanksRows(Case):
    """A sum by the batch size that the loader was given, which is one rank's."""

    pair = True
    modes = ("step", "forward")

    def setup(self, stage):
        self.batch_size = self.rows // self.trainer.world_size

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum") / self.batch_size


class AveragesOfSumsStayWhole(Case):
    """What becomes of sums in buffers that the step itself uses is no total for others; nor is a number that is set."""

    modes = ("step",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("decayed", torch.zeros(3))
        self.batch_size = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.batch_size = len(x)
        self.sums = self.sums + x.sum(0)
        self.count = self.count + len(x)
        self.decayed.mul_(0.9).add_(F.one_hot(y, 3).sum(0), alpha=0.1)
        return F.cross_entropy(self.net(x - self.sums / self.count), y)

    def on_train_epoch_end(self):
        self.log("mean", (self.sums / self.count).mean())


class QueueOfKeysStaysWhole(_Validates):
    """A step that does not run on twice its rows, as a queue of keys takes so many and no more."""

    modes = ("step",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(12, 4))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = self.loss(batch) + (x @ self.queue.T).mean()
        self.queue = torch.cat([x, self.queue[: len(self.queue) - len(x)]])
        self.seen = loss.detach()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", self.seen)
