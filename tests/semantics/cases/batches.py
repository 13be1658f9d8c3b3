"""Batches of any shape: objects, strings, numbers, other orders of dims, other loaders."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.semantics.base import FORWARD, Case, local_part


class StringChoosesHead(Case):
    """A task's name in the batch chooses one of two heads."""

    pair = True

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def collate(self, x, y, index):
        return {"x": x, "y": y, "task": "ab"[index % 2]}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.heads[batch["task"]](self.net(batch["x"])), batch["y"])


class StringBranches(Case):
    """Read by other ways: a prefix, a comparison, a membership."""

    def collate(self, x, y, index):
        return {"x": x, "y": y, "name": ("train-easy", "train-hard", "other")[index]}

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch["x"], batch["y"]))
        loss = loss * 2 if batch["name"].startswith("train") else loss
        return loss * 3 if "hard" in batch["name"] else loss


class Identifiers(Case):
    """Names of rows, kept for later: other ones in each batch, none of which decides anything."""

    pair = True
    captures = 1
    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def collate(self, x, y, index):
        return {"x": x, "y": y, "ids": [f"{index}:{row}" for row in range(self.rows)]}

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss((batch["x"], batch["y"])), "ids": batch["ids"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen = outputs["ids"]


class NumbersInBatch(Case):
    """A float, an int and a flag beside the tensors."""

    quick = True

    def collate(self, x, y, index):
        return {"x": x, "y": y, "weight": 0.5 * (index + 1), "shift": index, "double": index == 1}

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch["x"], (batch["y"] + batch["shift"]) % 3)) * batch["weight"]
        return loss * 2 if batch["double"] else loss


class NoneInBatch(Case):
    def collate(self, x, y, index):
        return {"x": x, "y": y, "mask": None if index % 2 else (x > 0).float()}

    def training_step(self, batch, batch_idx):
        x = batch["x"] if batch["mask"] is None else batch["x"] * batch["mask"]
        return self.loss((x, batch["y"]))


class KeysThatComeAndGo(Case):
    def collate(self, x, y, index):
        return {"x": x, "y": y} if index % 2 else {"x": x, "y": y, "extra": x * 2}

    def training_step(self, batch, batch_idx):
        return self.loss((batch.get("extra", batch["x"]), batch["y"]))


class Sample:
    """What graph libraries hand over: an object with tensors and a `to` of its own."""

    def __init__(self, x, y, name):
        self.x, self.y, self.name = x, y, name

    def to(self, device, **kwargs):
        return Sample(self.x.to(device), self.y.to(device), self.name)


class OwnClass(Case):
    pair = True

    def collate(self, x, y, index):
        return Sample(x, y, f"batch{index}")

    def local(self, batch, rank, shards):
        return Sample(*local_part((batch.x, batch.y, batch.name), rank, shards, self.rows))

    def training_step(self, batch, batch_idx):
        return self.loss((batch.x, batch.y)) * (2.0 if batch.name == "batch1" else 1.0)


class OwnClassWithoutTo(Case):
    """Tensors by attribute of a plain namespace, one of them in a dict."""

    def collate(self, x, y, index):
        return SimpleNamespace(inputs={"x": x}, y=y, index=index)

    def local(self, batch, rank, shards):
        inputs, y = local_part((batch.inputs, batch.y), rank, shards, self.rows)
        return SimpleNamespace(inputs=inputs, y=y, index=batch.index)

    def training_step(self, batch, batch_idx):
        return self.loss((batch.inputs["x"], batch.y)) * (1 + batch.index)


@dataclass
class Pair:
    x: Any
    y: Any
    scale: float = 1.0


class DataclassBatch(Case):
    quick = True

    def collate(self, x, y, index):
        return Pair(x, y, 1.0 + index)

    def local(self, batch, rank, shards):
        return Pair(*local_part((batch.x, batch.y, batch.scale), rank, shards, self.rows))

    def training_step(self, batch, batch_idx):
        return self.loss((batch.x, batch.y)) * batch.scale


Named = namedtuple("Named", ["x", "y", "tag"])


class NamedTupleBatch(Case):
    def collate(self, x, y, index):
        return Named(x, y, "even" if index % 2 == 0 else "odd")

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch.x, batch.y))
        return loss if batch.tag == "even" else loss * 0.3


class Encoding(UserDict):
    """What tokenizers return: a mapping that is no dict, with attributes."""

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device, **kwargs):
        return Encoding({name: value.to(device) for name, value in self.data.items()})


class MappingBatch(Case):
    quick = True

    def collate(self, x, y, index):
        return Encoding(x=x, y=y)

    def local(self, batch, rank, shards):
        return Encoding(local_part(dict(batch.data), rank, shards, self.rows))

    def training_step(self, batch, batch_idx):
        return self.loss((batch.x, batch["y"]))


class NumpyBatch(Case):
    """An array that stays one: nobody turns it into a tensor but the step."""

    def collate(self, x, y, index):
        return {"x": x, "y": y, "weights": np.array([1.0, 0.5 + index, 2.0])}

    def training_step(self, batch, batch_idx):
        weights = torch.as_tensor(batch["weights"]).float()
        return F.cross_entropy(self.net(batch["x"]), batch["y"], weight=weights, reduction="none").mean()


class SingleTensor(Case):
    def collate(self, x, y, index):
        return x

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()


class ScalarTensor(Case):
    """A tensor without dims, and one as long as no batch: alike on all ranks."""

    def collate(self, x, y, index):
        return {"x": x, "y": y, "level": torch.tensor(1.0 + index), "classes": torch.tensor([1.0, 2.0, 0.5 + index])}

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"]) * batch["classes"]
        return F.cross_entropy(logits, batch["y"]) * batch["level"]


class TimeFirst(Case):
    """Sequences as [time, row, feature] from a loader that knows its batch size."""

    pair = True

    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(4, 6)

    def loader(self, batches, rank, shards):
        rows = [row for x, y in batches for row in zip(x, y, strict=True)]
        size = self.rows // shards
        mine = [row for start in range(0, len(rows), self.rows) for row in rows[start:][rank * size :][:size]]
        return DataLoader(mine, batch_size=size, collate_fn=_time_first)

    def training_step(self, batch, batch_idx):
        x, y = batch
        _, hidden = self.recurrent(x)
        return F.cross_entropy(self.net[2](hidden[0]), y)


def _time_first(rows):
    x, y = zip(*rows, strict=True)
    stacked = torch.stack(x)
    return torch.stack([stacked, stacked.roll(1, 1), stacked * 0.5]), torch.stack(y)


class Graphs(Case):
    """Nodes and edges: tensors of other lengths, positions within the rank's own."""

    pair = True
    refusal = "batch_dims|rows|graph"
    steps = 2

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def collate(self, x, y, index):
        edges = torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 3, 0, 1, 3]])
        return SimpleNamespace(x=x, y=y, edges=torch.cat([edges, edges + 4], 1))

    def local(self, batch, rank, shards):
        edges = batch.edges if shards == 1 else batch.edges[:, :6]
        x, y = local_part((batch.x, batch.y), rank, shards, self.rows)
        return SimpleNamespace(x=x, y=y, edges=edges)

    def training_step(self, batch, batch_idx):
        source, target = batch.edges
        hidden = torch.zeros(len(batch.x), 6).index_add(0, target, self.first(batch.x)[source])
        return F.cross_entropy(self.second(hidden.tanh()), batch.y)


class PaddedToLongest(Case):
    """Collators of two ranks pad to the longest of their own rows."""

    pair = True
    refusal = "pad"

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 3)

    def collate(self, x, y, index):
        lengths = torch.tensor([2, 3, 2, 3, 5, 4, 2, 3]) + index % 2
        tokens = (x.abs() * 10).long() % 11 + 1
        tokens = torch.cat([tokens, tokens], 1)
        tokens[torch.arange(8)[None] >= lengths[:, None]] = 0
        return {"tokens": tokens[:, : int(lengths.max())], "y": y}

    def local(self, batch, rank, shards):
        part = local_part(batch, rank, shards, self.rows)
        longest = int((part["tokens"] != 0).sum(1).max())
        return {"tokens": part["tokens"][:, :longest], "y": part["y"]}

    def training_step(self, batch, batch_idx):
        mask = (batch["tokens"] != 0).float()
        hidden = (self.embed(batch["tokens"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.cross_entropy(self.head(hidden), batch["y"])


class LengthOfEachBatch(Case):
    """More lengths than captures are allowed: never stopped in the middle."""

    epochs, steps = 1, 10
    strategy_options: ClassVar = {"max_captures": 3}

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 3)

    def collate(self, x, y, index):
        return {"tokens": ((x.abs() * 10).long() % 11).repeat(1, 4)[:, : 3 + index], "y": y}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.embed(batch["tokens"]).mean(1)), batch["y"])


class SmallerLast(Case):
    pair = True

    def batches(self):
        *others, (x, y) = super().batches()
        return [*others, (x[:4], y[:4])]

    def local(self, batch, rank, shards):
        return tuple(leaf.chunk(shards)[rank].clone() for leaf in batch)


class UnequalRows(Case):
    """Ranks with different numbers of rows: the mean of means, as under DDP."""

    modes, oracle = FORWARD, "ddp"
    refusal = "rows"

    def local(self, batch, rank, shards):
        x, y = super().local(batch, rank, shards)
        return (x[:-1], y[:-1]) if rank == 1 else (x, y)


class ListsOfTensors(Case):
    """Detection: a list of samples, each a dict with tensors of its own length."""

    steps = 2
    refusal = "batch_dims|rows"

    def __init__(self):
        super().__init__()
        self.boxes = nn.Linear(2, 1)

    def collate(self, x, y, index):
        return [{"image": x[i], "boxes": x[i].repeat(1 + i % 3).view(-1, 2), "label": y[i]} for i in range(self.rows)]

    def training_step(self, batch, batch_idx):
        losses = [self.loss((s["image"][None], s["label"][None])) + self.boxes(s["boxes"]).mean() for s in batch]
        return torch.stack(losses).mean()


class Packed(Case):
    """A PackedSequence, made by the collator."""

    refusal = "PackedSequence"
    steps = 2

    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(2, 6, batch_first=True)

    def collate(self, x, y, index):
        return x, y

    def loader(self, batches, rank, shards):
        mine = [self.local(batch, rank, shards) for batch in batches]
        return DataLoader([_pack(x, y) for x, y in mine], batch_size=None, collate_fn=_same)

    def training_step(self, batch, batch_idx):
        sequence, y = batch
        _, hidden = self.recurrent(sequence)
        return F.cross_entropy(self.net[2](hidden[0]), y)


def _pack(x, y):
    lengths = torch.tensor([2, 1, 2, 1, 2, 1, 2, 1][: len(x)])
    return nn.utils.rnn.pack_padded_sequence(x.view(-1, 2, 2), lengths, batch_first=True, enforce_sorted=False), y


def _same(batch):
    return batch


class TwoLoaders(Case):
    """A dict of loaders: labelled and not."""

    def loader(self, batches, rank, shards):
        own = super().loader
        return {"labelled": own(batches, rank, shards), "other": own(batches[::-1], rank, shards)}

    def training_step(self, batch, batch_idx):
        return self.loss(batch["labelled"]) + 0.1 * self.net(batch["other"][0]).square().mean()


class TwoValidationLoaders(Case):
    """`dataloader_idx` chooses what is computed."""

    quick = validates = True

    def loader(self, batches, rank, shards):
        loader = super().loader(batches, rank, shards)
        return [loader, super().loader(batches, rank, shards)] if len(batches) == 2 else loader

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch) * (1 + dataloader_idx) + batch_idx
        self.log("val_loss", loss)
        return loss


class _Stateful(IterableDataset):
    """Goes on where it stopped: each batch is handed out once, whoever asks."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __iter__(self):
        for _ in range(3):
            self.at += 1
            yield self.batches[(self.at - 1) % len(self.batches)]


class StatefulLoader(Case):
    """What is read ahead must not be missing."""

    pair, steps = True, 5

    def loader(self, batches, rank, shards):
        return DataLoader(_Stateful([self.local(batch, rank, shards) for batch in batches]), batch_size=None)


class _CountsReaders(IterableDataset):
    """Each reading gives other batches: an epoch's shuffle that counts."""

    def __init__(self, batches):
        self.batches, self.readers = batches, 0

    def __iter__(self):
        self.readers += 1
        yield from ((x * self.readers, y) for x, y in self.batches)


class LoaderThatCountsReaders(Case):
    def loader(self, batches, rank, shards):
        return DataLoader(_CountsReaders([self.local(batch, rank, shards) for batch in batches]), batch_size=None)


class ChangedByTransferHooks(Case):
    """Hooks around the transfer change the batch, by the step."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0].flip(1), batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0] * (1 + self.global_step), "y": batch[1], "step": self.global_step}

    def training_step(self, batch, batch_idx):
        return self.loss((batch["x"], batch["y"])) * (1 + batch["step"])
