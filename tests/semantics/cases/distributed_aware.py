"""Steps that know of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.semantics.base import FORWARD, Case


def world_size() -> int:
    """Of libraries that also run without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class ScalesByWorldSize(Case):
    """A library that undoes the mean over ranks by itself."""

    pair = True

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * world_size()


class TrainersWorldSize(Case):
    quick = True

    def training_step(self, batch, batch_idx):
        self.log("world", float(self.trainer.world_size))
        return self.loss(batch) * self.trainer.world_size


class AsksWhetherInitialised(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 0.5 if dist.is_initialized() and dist.get_world_size() > 1 else loss


class Rank(Case):
    """Each rank weighs its rows by its number."""

    pair = True
    modes, oracle = FORWARD, "ddp"
    refusal = "rank"

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.global_rank)


class RankByTorch(Case):
    modes, oracle = FORWARD, "ddp"
    refusal = "rank"

    def training_step(self, batch, batch_idx):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.loss(batch) * (1 + rank)


class AllGather(Case):
    """Lightning's `all_gather` of features, for a contrastive loss over all ranks' rows."""

    pair = True

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        everyone = self.all_gather(logits.detach()).reshape(-1, 3)
        return F.cross_entropy(logits, batch[1]) + 0.1 * (logits @ everyone.T).logsumexp(1).mean()


class AllGatherWithGradient(Case):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        everyone = self.all_gather(logits, sync_grads=True).reshape(-1, 3)
        return F.cross_entropy(logits, batch[1]) + 0.1 * everyone.square().mean()


class AllReduce(Case):
    """A collective of torch's own, in place."""

    quick = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        total = loss.detach().clone()
        if world_size() > 1:
            dist.all_reduce(total)
        self.log("total", total / world_size())
        return loss / total


class Broadcast(Case):
    """Rank 0's statistics for all."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        center = x.mean(0)
        if world_size() > 1:
            dist.broadcast(center, 0)
        return self.loss((x - center, y))


class _KeptOnRankZero(Case):
    """Something that only rank 0 keeps, in whatever mode."""

    keeps = uncompared = ("kept",)

    def __init__(self):
        super().__init__()
        self.kept = []

    @classmethod
    def check(cls, outcome):
        steps = [(index, epoch) for epoch in range(cls.epochs) for index in range(cls.steps)]
        for i, row in enumerate(outcome.kept[:-1]):
            assert row["kept"] == ([] if outcome.rank else [list(step) for step in steps[: i + 1]])


class RankZeroOnly(_KeptOnRankZero):
    pair = True

    @rank_zero_only
    def keep(self, *value):
        self.kept.append(value)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.keep(batch_idx, self.current_epoch)
        return loss


class IsGlobalZero(_KeptOnRankZero):
    """The usual guard around a print or a direct log."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.kept.append((batch_idx, self.current_epoch))
        return loss


class LogsOnRankZero(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss_0", loss, rank_zero_only=True, on_epoch=True)
        return loss


class SyncedLogs(Case):
    """Every way of reduction over ranks, whose result DDP and one device may not share."""

    validates = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("mean", loss, sync_dist=True, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class StrategysReduce(Case):
    """The strategy's own reduction, called by hand."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("mean", self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean"))
        return loss


class StrategysBarrier(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.trainer.strategy.barrier()
        picked = self.trainer.strategy.broadcast(self.global_step * 2)
        return loss * (1 + picked)


class RankInBatch(Case):
    """The collator tells rows of one rank from those of another."""

    modes, oracle = FORWARD, "ddp"
    refusal = "other values on rank"

    def local(self, batch, rank, shards):
        return {"batch": super().local(batch, rank, shards), "weight": torch.tensor(1.0 + rank)}

    def training_step(self, batch, batch_idx):
        return self.loss(batch["batch"]) * batch["weight"]


class NumberOfRankInBatch(RankInBatch):
    """The same as a number beside the tensors."""

    refusal = "rank"

    def local(self, batch, rank, shards):
        return {"batch": Case.local(self, batch, rank, shards), "weight": 1.0 + rank}


class BuffersOfRanksDiffer(Case):
    """Buffers that start differently: all ranks take rank 0's."""

    pair = True
    keeps = ("table",)

    def __init__(self):
        super().__init__()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.register_buffer("table", torch.tensor([1.0 + rank, 2.0, 3.0]))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) * self.table, batch[1])


class ParametersOfRanksDiffer(Case):
    """Parameters, too."""

    quick = True

    def __init__(self):
        super().__init__()
        rank = dist.get_rank() if dist.is_initialized() else 0
        with torch.no_grad():
            self.net[0].weight += rank


class BufferOfRanksGrowsApart(Case):
    """Statistics of each rank's rows in a buffer: DDP gives all ranks rank 0's before each step."""

    keeps = ("mean",)

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.log("world", float(world_size()))
        return self.loss((x - self.mean, y))
