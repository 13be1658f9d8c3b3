"""Steps that keep something: numbers, tensors, containers, of the module and of what it reaches."""

from __future__ import annotations

import io
from collections import Counter, defaultdict, deque
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from tests.semantics.base import STEP, Case


class CountsSteps(Case):
    pair, captures, steps = True, 2, 4
    keeps = ("n",)
    modes = STEP

    def __init__(self):
        super().__init__()
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        self.log("n", float(self.n))
        return self.loss(batch) / self.n


class CountsOnly(Case):
    """A counter that no tensor sees."""

    keeps = ("n", "batches_seen")

    def __init__(self):
        super().__init__()
        self.n, self.batches_seen = 0, 0.0

    def training_step(self, batch, batch_idx):
        self.n, self.batches_seen = self.n + 1, self.batches_seen + len(batch[0]) / self.rows
        return self.loss(batch)


class LastLoss(Case):
    quick = True
    keeps = ("last", "index")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last, self.index = loss.detach(), batch_idx
        return loss


class LastLossWithGraph(Case):
    """Not even detached; read by a hook."""

    keeps = ("total",)

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def training_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        return self.last

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.total += float(self.last)


class RunningLoss(Case):
    """A running mean kept as a tensor: read and written at each step."""

    pair = True
    keeps = ("running",)

    def __init__(self):
        super().__init__()
        self.running = torch.tensor(1.0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.running = 0.8 * self.running + 0.2 * loss.detach()
        self.log("running", self.running)
        return loss / self.running


class NoneAtFirst(Case):
    """A state that is made by the first step."""

    keeps = ("previous",)

    def __init__(self):
        super().__init__()
        self.previous = None

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.previous is not None:
            loss = loss + (logits - self.previous).square().mean()
        self.previous = logits.detach()
        return loss


class DictEntries(Case):
    pair = True
    keeps = ("state",)

    def __init__(self):
        super().__init__()
        self.state = {"steps": 0, "losses": {}}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.state["steps"] += 1
        self.state["losses"][batch_idx] = loss.detach()
        return loss


class ListOfLosses(Case):
    """Losses in a list, averaged and cleared every second step."""

    quick, steps, remembers = True, 4, True
    keeps = ("losses", "means")

    def __init__(self):
        super().__init__()
        self.losses, self.means = [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        if len(self.losses) == 2:
            self.means.append(torch.stack(self.losses).mean())
            self.losses.clear()
        return loss


class OutputsOfEpoch(Case):
    """What Lightning 2 tells everyone to do: outputs kept by the steps, used and cleared by the epoch's end."""

    pair = validates = True
    keeps = ("epochs_seen",)

    def __init__(self):
        super().__init__()
        self.train_outputs, self.val_outputs, self.epochs_seen = [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.train_outputs.append(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.val_outputs.append({"hits": (logits.argmax(1) == batch[1]).float().mean(), "index": batch_idx})

    def on_train_epoch_end(self):
        self.epochs_seen.append(torch.stack(self.train_outputs).mean().detach())
        self.train_outputs.clear()

    def on_validation_epoch_end(self):
        self.log("val_hits", torch.stack([output["hits"] for output in self.val_outputs]).mean())
        self.epochs_seen.append(len(self.val_outputs))
        self.val_outputs.clear()


class RowsOfEpoch(Case):
    """Predictions of all rows, joined at the end of the validation."""

    validates = True
    keeps = ("joined",)

    def __init__(self):
        super().__init__()
        self.kept, self.joined = [], None

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.net(batch[0]).mean(1))

    def on_validation_epoch_end(self):
        self.joined = torch.stack(self.kept).mean(0)
        self.kept = []


class NestedLists(Case):
    keeps = ("history",)

    def __init__(self):
        super().__init__()
        self.history = [[], [[], {}]]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.history[0].append(batch_idx)
        self.history[1][0].append([loss.detach()])
        self.history[1][1][f"step{self.global_step}"] = (loss.detach() * 2, "text")
        return loss


class Queue(Case):
    """A momentum queue of features in a deque of fixed length."""

    quick, steps = True, 4
    keeps = ("queue",)

    def __init__(self):
        super().__init__()
        self.queue = deque(maxlen=2)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        for earlier in self.queue:
            loss = loss + 0.1 * (logits.mean(0) - earlier).square().sum()
        self.queue.append(logits.detach().mean(0))
        return loss


class OtherContainers(Case):
    keeps = ("counts", "names", "groups", "array")

    def __init__(self):
        super().__init__()
        self.counts, self.names, self.groups, self.array = Counter(), set(), defaultdict(list), np.zeros(3)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.counts[batch_idx % 2] += 1
        self.names.add(f"batch{batch_idx}")
        self.groups[self.current_epoch].append(loss.detach())
        self.array[batch_idx] += batch_idx + 1
        return loss


class DynamicNames(Case):
    keeps = ("seen_0", "seen_1", "seen_2", "fresh")

    def __init__(self):
        super().__init__()
        self.fresh = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        setattr(self, f"seen_{batch_idx}", loss.detach())
        if hasattr(self, "fresh") and self.current_epoch == 1:
            del self.fresh
        return loss


class WrittenBySubmodule(Case):
    """A submodule that keeps its features for a penalty, and counts its calls."""

    quick = True
    keeps = ("net.0.kept", "net.0.calls")

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(_Keeps(), nn.Tanh())

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * self.net[0].kept.square().mean()


class _Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept, self.calls = nn.Linear(4, 3), None, 0

    def forward(self, x):
        self.calls += 1
        self.kept = self.linear(x)
        return self.kept / self.calls


class WrittenElsewhere(Case):
    """On the class, on the Trainer, in the hyperparameters."""

    shared: ClassVar = {"n": 0}
    total: ClassVar = 0
    keeps = ("shared", "total", "hparams.count", "trainer.noted")

    @classmethod
    def reset(cls):
        cls.shared["n"], cls.total = 0, 0

    def __init__(self, count=0):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.shared["n"] += 1
        type(self).total += 2
        self.hparams.count = self.global_step
        self.trainer.noted = batch_idx
        return self.loss(batch)


class HistoryTensor(Case):
    """A table that is filled row by row, which is no buffer."""

    quick = True
    keeps = ("history",)

    def __init__(self):
        super().__init__()
        self.history = torch.zeros(6)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.history[self.global_step] = loss.detach()
        return loss + self.history.sum() * 0.1 * self.net[2].bias.sum()


class HistoryBuffer(HistoryTensor):
    """The same as a buffer."""

    def __init__(self):
        super().__init__()
        del self.history
        self.register_buffer("history", torch.zeros(6))


class BufferReplaced(Case):
    """A buffer by assignment, as in running statistics by hand."""

    quick = True
    keeps = ("mean",)

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.loss((x - self.mean, y))


class BufferInPlace(Case):
    keeps = ("mean", "count")

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
        return self.loss((x - self.mean, y)) / self.count


class QueueWithPointer(Case):
    """MoCo's queue: a buffer written at a position that is read from another."""

    steps = 4
    keeps = ("queue", "pointer")

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1]) + (logits.mean(0) @ self.queue.clone().T).mean()
        at = int(self.pointer)
        self.queue[at : at + 2] = logits.detach()[:2]
        self.pointer[0] = (at + 2) % 6
        return loss


class ConditionalWrites(Case):
    keeps = ("even", "best", "best_step")

    def __init__(self):
        super().__init__()
        self.even, self.best, self.best_step = None, float("inf"), -1

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.global_step % 2 == 0:
            self.even = loss.detach()
        if batch_idx == 1:
            self.best, self.best_step = min(self.best, 10.0 / (1 + self.global_step)), self.global_step
        return loss


class WritesToStream(Case):
    keeps = ("text",)

    def __init__(self):
        super().__init__()
        self.stream = io.StringIO()

    @property
    def text(self):
        return self.stream.getvalue()

    def training_step(self, batch, batch_idx):
        self.stream.write(f"{self.global_step},")
        return self.loss(batch)


class CarriedState(Case):
    """Truncated backpropagation: the state of a recurrent net goes from step to step, rows by rows."""

    pair = True
    keeps = ("hidden",)

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(4, 6), None

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return nn.functional.cross_entropy(self.net[2](hidden), y)


class AverageOfWeights(Case):
    """An average of the weights, kept as plain tensors in a dict."""

    keeps = ("shadow",)

    def __init__(self):
        super().__init__()
        self.shadow = {}

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                before = self.shadow.get(name, torch.zeros_like(parameter))
                self.shadow[name] = before * 0.5 + parameter.detach() * 0.5
        return self.loss(batch)
