"""Steps that draw."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.nn.functional as F

from tests.semantics.base import Case


class NumpyMixup(Case):
    """Mixup as it is published: a ratio and an order from numpy."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        ratio = np.random.beta(0.4, 0.4)
        order = torch.from_numpy(np.random.permutation(len(x)))
        logits = self.net(ratio * x + (1 - ratio) * x[order])
        return ratio * F.cross_entropy(logits, y) + (1 - ratio) * F.cross_entropy(logits, y[order])


class NumpyGenerator(Case):
    """A generator of the module's own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(5)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.rng.uniform(0.5, 1.5)


class PythonRandom(Case):
    """Python's own, which decides and scales."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.flip(1) if random.random() < 0.5 else x
        return self.loss((x, y)) * random.choice([0.5, 1.0, 2.0])


class PythonShuffle(Case):
    def training_step(self, batch, batch_idx):
        x, y = batch
        order = list(range(4))
        random.shuffle(order)
        return self.loss((x[:, order], y))


class TorchGenerator(Case):
    """A torch generator of the module's own: noise alike for each row."""

    quick = True

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x + torch.randn(4, generator=self.generator), y))


class TorchGeneratorAsNumber(TorchGenerator):
    def training_step(self, batch, batch_idx):
        number = torch.randint(1, 9, (1,), generator=self.generator).item()
        return self.loss(batch) * number


class SeededInStep(Case):
    """A seed for each step: noise that can be repeated."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + self.global_step)
            noise = torch.randn(4)
        return self.loss((x + noise, y))


class TorchNumber(Case):
    """Torch's default generator as a number in Python: noise that changes, which no oracle foretells."""

    uncompared = ("draw",)
    keeps = ("draw",)

    def training_step(self, batch, batch_idx):
        self.draw = torch.rand(1).item()
        return self.loss(batch)

    @classmethod
    def check(cls, outcome):
        draws = [row["draw"] for row in outcome.kept[:-1]]
        assert len(set(draws)) == len(draws), draws


class TorchNoise(Case):
    """Torch's default generator in tensors: other noise at each step, kept."""

    uncompared = ("noise",)
    keeps = ("noise",)

    def training_step(self, batch, batch_idx):
        noise = torch.rand(4)
        self.noise = noise + torch.bernoulli(torch.full((4,), 0.5))
        return self.loss(batch) + noise.sum() * 0 * self.net[2].bias.sum()

    @classmethod
    def check(cls, outcome):
        seen = {tuple(row["noise"].tolist()) for row in outcome.kept[:-1]}
        assert len(seen) == len(outcome.kept) - 1, seen


class DropoutMasks(Case):
    """Masks differ between steps; what they do to the loss is multiplied by zero."""

    uncompared = ("mask",)
    keeps = ("mask",)

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        mask = self.drop(torch.ones_like(batch[0]))
        self.mask = mask.detach()
        return self.loss(batch) + 0 * mask.sum()

    @classmethod
    def check(cls, outcome):
        seen = {tuple(row["mask"].flatten().tolist()) for row in outcome.kept[:-1]}
        assert len(seen) == len(outcome.kept) - 1, seen


class RandomValidation(Case):
    """A validation that draws from Python: its draws follow those of training."""

    validates = True

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * random.random()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * random.random())


class RandomAugmentInModule(Case):
    """A draw from numpy inside of a submodule's forward."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(_Jitter(), *self.net)


class _Jitter(torch.nn.Module):
    def forward(self, x):
        return x * float(np.random.uniform(0.5, 2.0)) if self.training else x


class RandomLeaf(Case):
    """Stochastic depth by Python: whether a block runs at all."""

    steps = 4

    def __init__(self):
        super().__init__()
        self.block = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if random.random() < 0.6:
            x = x + self.block(x)
        return self.loss((x, y))


class SystemEntropy(Case):
    """Draws that no seed repeats."""

    keeps = uncompared = ("token",)

    def training_step(self, batch, batch_idx):
        self.token = int.from_bytes(os.urandom(4), "big")
        return self.loss(batch)

    @classmethod
    def check(cls, outcome):
        tokens = [row["token"] for row in outcome.kept[:-1]]
        assert len(set(tokens)) == len(tokens), tokens


class SystemRandom(SystemEntropy):
    """The same by way of `random`."""

    def __init__(self):
        super().__init__()
        self.source = random.SystemRandom()

    def training_step(self, batch, batch_idx):
        self.token = self.source.random()
        return self.loss(batch)
