"""Habits of published LightningModules, each as small as it goes."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from tests.semantics.base import Case, On


class Metrics(Case):
    """torchmetrics objects of both stages, logged as objects and by value."""

    pair = validates = True

    def __init__(self):
        super().__init__()
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.train_accuracy(logits, batch[1])
        self.log("accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_accuracy.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("val_accuracy", self.val_accuracy.compute())
        self.val_accuracy.reset()


class MetricsEveryTwo(Case):
    """A metric that the step itself computes and resets, every second batch."""

    steps, remembers = 4, True
    keeps = ("values",)

    def __init__(self):
        super().__init__()
        self.mean, self.values = torchmetrics.MeanMetric(sync_on_compute=False), []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        if batch_idx % 2 == 1:
            self.values.append(self.mean.compute())
            self.mean.reset()
        return loss


class Uncertainty(Case):
    """Losses weighed by learned variances, chosen by names in a dict."""

    def __init__(self):
        super().__init__()
        self.variances = nn.ParameterDict(
            {"class": nn.Parameter(torch.zeros(())), "margin": nn.Parameter(torch.ones(()))}
        )

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        losses = {"class": F.cross_entropy(logits, batch[1]), "margin": F.multi_margin_loss(logits, batch[1])}
        total = sum(torch.exp(-self.variances[name]) * loss + self.variances[name] for name, loss in losses.items())
        self.log_dict({**losses, "loss": total})
        return total


class Distillation(Case):
    """A teacher outside of the module tree, held by a list so that it is not saved."""

    quick = True

    def __init__(self):
        super().__init__()
        self.outside = [copy.deepcopy(self.net).eval()]

    def on_train_epoch_end(self):
        for parameter in self.outside[0].parameters():
            parameter.data.mul_(0.5)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.outside[0](batch[0]).softmax(1)
        return F.cross_entropy(self.net(batch[0]), target)


class ProgressiveLayers(Case):
    """Blocks that come in one after another."""

    epochs = 3

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.depth = 0

    def on_train_epoch_start(self):
        self.depth = self.current_epoch

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks[: self.depth]:
            x = x + block(x).tanh()
        return self.loss((x, y))


class LayerReplaced(Case):
    """A head of the same shape that a hook replaces by another object."""

    refusal = "replaced|parameters|modules"

    def __init__(self):
        super().__init__()
        self.post = nn.Identity()

    def on_train_epoch_end(self):
        self.post = nn.Softplus()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.post(self.net(batch[0])), batch[1])


class Warmup(Case):
    """Loss terms that start after some steps, by a list of dicts."""

    quick = True

    def __init__(self):
        super().__init__()
        self.terms = [{"start": 0, "weight": 1.0, "kind": "class"}, {"start": 2, "weight": 0.5, "kind": "margin"}]

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        losses = {"class": F.cross_entropy(logits, batch[1]), "margin": F.multi_margin_loss(logits, batch[1])}
        active = [term for term in self.terms if self.global_step >= term["start"]]
        self.log("terms", float(len(active)))
        return sum(term["weight"] * losses[term["kind"]] for term in active)


class BestSoFar(Case):
    """Patience in a callback, which the step reads."""

    def callbacks(self):
        class Patience(On):
            bad = 0

        patience = Patience(
            train_batch_end=lambda trainer, module, index: setattr(patience, "bad", patience.bad + index)
        )
        self.patience = patience
        return [patience]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.patience.bad)


class Warns(Case):
    """A warning at each step."""

    warns = "seen batch"

    def training_step(self, batch, batch_idx):
        warnings.warn(f"seen batch {batch_idx}", stacklevel=2)
        return self.loss(batch)


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.rows = []

    def emit(self, record):
        self.rows.append(record.getMessage())


class LogsByPython(Case):
    """Python's logging at each step."""

    keeps = ("records",)

    def __init__(self):
        super().__init__()
        self.handler = _Records()
        self.speaker = logging.Logger("case")
        self.speaker.addHandler(self.handler)

    @property
    def records(self):
        return list(self.handler.rows)

    def training_step(self, batch, batch_idx):
        self.speaker.info("batch %d of epoch %d", batch_idx, self.current_epoch)
        return self.loss(batch)


class ContextManager(Case):
    """A context of the user's that changes state on its way in and out."""

    keeps = ("entered",)

    def __init__(self):
        super().__init__()
        self.entered, self.scale = 0, 1.0

    @contextlib.contextmanager
    def scaled(self, by):
        before, self.scale = self.scale, by
        self.entered += 1
        try:
            yield
        finally:
            self.scale = before

    def training_step(self, batch, batch_idx):
        with self.scaled(1.0 + batch_idx):
            loss = self.loss(batch) * self.scale
        return loss / self.scale


class SwitchesMode(Case):
    """`eval()` and `train()` within the step."""

    quick = True

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.eval()
        with torch.no_grad():
            clean = self.net(self.drop(x))
        self.train()
        return F.cross_entropy(self.net(x) + 0.5 * clean + self.drop(clean), y)


class CachedFunction(Case):
    """A cache by arguments, of a value that its first call fixes."""

    def __init__(self):
        super().__init__()
        self.table = lru_cache(maxsize=None)(lambda step: torch.tensor([1.0, 0.5, 2.0])[step])

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.table(batch_idx)


class CachedOfShape(Case):
    """A mask that is made once per length and kept in a dict."""

    keeps = ("masks",)

    def __init__(self):
        super().__init__()
        self.masks = {}

    def collate(self, x, y, index):
        return x[:, : 3 + index % 2], y

    def training_step(self, batch, batch_idx):
        x, y = batch
        width = x.shape[1]
        if width not in self.masks:
            self.masks[width] = torch.linspace(0.5, 1.5, width)
        return self.loss((F.pad(x * self.masks[width], (0, 4 - width)), y))


class RotaryCache(Case):
    """A buffer that is not saved and grows when a longer batch comes."""

    keeps = ("table",)

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def collate(self, x, y, index):
        return x[:, : 2 + index], y

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).float().cos()
        return self.loss((F.pad(x * self.table[: x.shape[1]], (0, 4 - x.shape[1])), y))


class CodebookByEma(Case):
    """VQ-VAE: a codebook in buffers, moved towards what it coded."""

    pair = True
    keeps = ("codes", "sizes")

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 12).view(4, 3))
        self.register_buffer("sizes", torch.ones(4))

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch[0])
        chosen = torch.cdist(hidden, self.codes).argmin(1)
        quantised = self.codes[chosen]
        with torch.no_grad():
            hot = (chosen[:, None] == torch.arange(4)).float()
            self.sizes.mul_(0.9).add_(hot.mean(0), alpha=0.1)
            moved = 0.9 * self.codes + 0.1 * (hot.T @ hidden) / len(hidden) / self.sizes[:, None]
            self.codes.copy_(moved)
        straight = hidden + (quantised - hidden).detach()
        return F.cross_entropy(straight, batch[1]) + (hidden - quantised).square().mean()


class Reinforce(Case):
    """A baseline that follows the reward: a number of the module by an average of tensors' means."""

    keeps = ("baseline",)

    def __init__(self):
        super().__init__()
        self.baseline = 0.0

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        reward = (logits.argmax(1) == batch[1]).float()
        chosen = F.log_softmax(logits, 1).gather(1, batch[1][:, None]).squeeze(1)
        loss = -((reward + 1 - self.baseline) * chosen).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * reward.mean()
        return loss


class LossScaleByHistory(Case):
    """Dynamic weights: the ratio of the last two losses."""

    steps = 4
    keeps = ("history",)

    def __init__(self):
        super().__init__()
        self.history = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        weight = 1.0
        if len(self.history) >= 2:
            weight = self.history[-1] / self.history[-2]
        self.history.append(loss.detach())
        return loss * weight


class EveryNthLog(Case):
    """Python lists of losses, logged as a mean every third step."""

    steps, remembers = 4, True

    def __init__(self):
        super().__init__()
        self.window = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.window.append(loss.detach())
        if (self.global_step + 1) % 3 == 0:
            self.log("window", torch.stack(self.window).mean())
            self.window = []
        return loss


class SharedByTwoModules(Case):
    """One state object that two submodules hold: one writes, the other reads."""

    keeps = ("state",)

    def __init__(self):
        super().__init__()
        self.state = {"level": 1.0}
        self.net = nn.Sequential(_Writer(self.state), _Reader(self.state), nn.Linear(4, 3))


class _Writer(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, x):
        self.state["level"] *= 0.5
        return x


class _Reader(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, x):
        return x * self.state["level"]


class GateByStep(Case):
    """A submodule that counts its own forwards while training."""

    validates = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), _Gate())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class _Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.forwards = 0

    def forward(self, x):
        if self.training:
            self.forwards += 1
        return x * math.tanh(self.forwards / 3)


class Registry(Case):
    """Augmentations by name, from a registry of the class that callbacks extend."""

    registry: ClassVar = {"none": lambda x: x}

    @classmethod
    def reset(cls):
        cls.registry = {"none": lambda x: x}

    def on_train_epoch_end(self):
        type(self).registry["flip"] = lambda x: x.flip(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for change in self.registry.values():
            x = change(x)
        return self.loss((x, y))


class Slots(Case):
    """State in an object without a dict."""

    keeps = ("count",)

    def __init__(self):
        super().__init__()
        self.state = _Slotted()

    @property
    def count(self):
        return self.state.count

    def training_step(self, batch, batch_idx):
        self.state.count += 1
        return self.loss(batch) / self.state.count


class _Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class DelegatingAttributes(Case):
    """`__getattr__` that looks into a container of settings."""

    def __init__(self):
        super().__init__()
        self.settings = {"gain": 1.0}

    def __getattr__(self, name):
        if name == "gain":
            return self.settings["gain"]
        return super().__getattr__(name)

    def on_train_epoch_end(self):
        self.settings["gain"] = 2.5

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.gain
