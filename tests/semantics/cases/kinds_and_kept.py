"""Steps that ask what something is, or call functions that keep something: results or attributes."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from torch import nn

from tests.semantics.base import FORWARD, STEP, Case


@lru_cache(maxsize=2)
def mask(columns: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, columns)


class CachedTensor(Case):
    """In training and in validation, which are captured each for itself."""

    modes = STEP
    quick = pair = True
    validates = True

    @classmethod
    def reset(cls):
        mask.cache_clear()

    def loss(self, batch):
        x, y = batch
        return super().loss((x * mask(x.shape[1]), y))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class CachedInMethod(CachedTensor):
    quick = pair = False

    @cache  # noqa: B019
    def factor(self, columns: int) -> dict[str, torch.Tensor]:
        return {"factor": mask(columns) * 2}

    def loss(self, batch):
        x, y = batch
        return Case.loss(self, (x * self.factor(x.shape[1])["factor"], y))


class CachedClosure(CachedTensor):
    quick = pair = False

    def __init__(self):
        super().__init__()

        @lru_cache
        def shift(columns):
            return torch.ones(columns) * 0.1

        self.shift = shift

    def loss(self, batch):
        x, y = batch
        return Case.loss(self, (x + self.shift(x.shape[1]), y))


@lru_cache
def steps_of(epochs: int) -> list[int]:
    return list(range(epochs))


class CachedNumbers(Case):
    modes = STEP

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * len(steps_of(3))


class CachedWithEffect(Case):
    """What changes something is called once in a training, and not at each step."""

    keeps = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    @cache  # noqa: B019
    def first(self) -> float:
        self.calls += 1
        return 2.0

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.first()


def scaled(loss: torch.Tensor) -> torch.Tensor:
    scaled.calls += 1
    return loss * scaled.factor / scaled.calls


class FunctionAttributes(Case):
    """One that a hook changes, and one that the function counts in."""

    quick = pair = True

    @classmethod
    def reset(cls):
        scaled.calls, scaled.factor = 0, 1.0

    def on_train_epoch_end(self):
        scaled.factor = 0.5

    def training_step(self, batch, batch_idx):
        return scaled(self.loss(batch))


def halved(loss: torch.Tensor) -> torch.Tensor:
    return loss * halved.factor


class FunctionAttributeRead(Case):
    modes = STEP

    @classmethod
    def reset(cls):
        halved.factor = 0.5

    def on_train_epoch_end(self):
        halved.factor = 0.25

    def training_step(self, batch, batch_idx):
        return halved(self.loss(batch))


class TypeIsTensor(Case):
    modes = STEP
    quick = pair = True

    def training_step(self, batch, batch_idx):
        loss, x = self.loss(batch), batch[0]
        weight = 1.0 if type(x) is torch.Tensor else 3.0
        weight += {torch.Tensor: 0.5}.get(type(x * 2), 5.0)
        return loss * weight


class TypeIsParameter(Case):
    """In forward mode it is a DTensor, as under FSDP2, and a Parameter to `isinstance`."""

    modes = STEP
    alone = True

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (0.25 if type(self.net[0].weight) is nn.Parameter else 7.0)


class TypeOfPlain(Case):
    """Of a number that is fed, and of a list and a dict whose entries are told apart."""

    modes = STEP
    quick = True

    def __init__(self):
        super().__init__()
        self.weights, self.table = [0.5, 1.0], {"a": 2.0}

    def training_step(self, batch, batch_idx):
        plain = type(self.weights) is list and type(self.table) is dict and type(batch_idx) is int
        return self.loss(batch) * (self.weights[0] if plain else 9.0) * (self.table["a"] + batch_idx)


class IsParameter(Case):
    modes = STEP
    quick = pair = True

    def training_step(self, batch, batch_idx):
        decayed = [p for p in (self.net[0].weight, batch[0]) if isinstance(p, nn.Parameter)]
        return self.loss(batch) + sum(p.square().sum() for p in decayed)


class MarkedParameters(Case):
    modes = FORWARD
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.net[0].weight.decay = 0.3

    def on_train_epoch_end(self):
        self.net[0].weight.decay = 0.1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + sum(getattr(p, "decay", 0.0) * p.square().sum() for p in self.parameters())


class CachedBound(CachedTensor):
    """As it is advised, in `__init__`; of each layer."""

    quick = pair = False

    def __init__(self):
        super().__init__()
        self.factors = [self._cached(), self._cached()]

    @staticmethod
    def _cached():
        @lru_cache
        def factor(columns):
            return torch.linspace(0.5, 1.5, columns)

        return factor

    def loss(self, batch):
        x, y = batch
        return Case.loss(self, (x * self.factors[0](x.shape[1]) * self.factors[1](x.shape[1]), y))


class HoldsParameter(Case):
    """A parameter that the step assigns is no new one, where it is another parameter's name on one device."""

    quick = True

    def __init__(self):
        super().__init__()
        self.last = None

    def training_step(self, batch, batch_idx):
        self.last = self.net[0].weight
        return self.loss(batch) + self.last.square().sum() * 0.1

    def on_train_end(self):
        del self.last


class ModuleOfTheStep(Case):
    modes = STEP

    def training_step(self, batch, batch_idx):
        layer = nn.Identity()
        layer.weight = self.net[0].weight
        return self.loss(batch) + layer.weight.square().sum() * 0.1


class FunctionAttributeByText(FunctionAttributeRead):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * getattr(halved, "factor", 1.0)


class MarkedByTexts(MarkedParameters):
    quick = pair = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for p in self.parameters():
            for name in ("decay", "other"):
                if hasattr(p, name):
                    loss = loss + getattr(p, name) * p.square().sum()
        return loss


class Recipe:
    """Made at each step, or kept: a function in its making closes over it."""

    def __init__(self, text: str):
        self.parts: list[float] = []

        def add(part):
            self.parts.append(float(part))

        for part in text.split():
            add(part)


@lru_cache
def recipe(text: str) -> Recipe:
    return Recipe(text)


class MakesWithInner(Case):
    modes = STEP
    quick = pair = True

    @classmethod
    def reset(cls):
        recipe.cache_clear()

    def training_step(self, batch, batch_idx):
        made = Recipe("0.5 0.25")
        return self.loss(batch) * sum(recipe("0.5 1").parts) * sum(made.parts)


class KeepsInner(Case):
    """One that counts, and one with a default that grows: both of the first step, called in later ones."""

    quick = pair = True

    def __init__(self):
        super().__init__()
        self.counted = self.grown = None

    def on_train_end(self):
        self.counted = self.grown = None  # local functions cannot be compared

    def training_step(self, batch, batch_idx):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        def grow(held=[]):  # noqa: B006
            held.append(1)
            return len(held)

        if self.counted is None:
            self.counted, self.grown = count, grow
        return self.loss(batch) * (0.5 + self.counted()) / self.grown()


class Configured(nn.Module):
    """Looks itself up as `diffusers` models do."""

    def __init__(self):
        super().__init__()
        self.settings = {"scale": 0.5}
        self.shift = 0.1

    def __getattr__(self, name):
        if "settings" in self.__dict__ and name in self.__dict__["settings"]:
            return self.__dict__["settings"][name]
        return super().__getattr__(name)

    def forward(self, x):
        return x * self.scale + self.__dict__.get("shift", 0.0)


class OwnDict(Case):
    modes = STEP
    quick = pair = True

    def __init__(self):
        super().__init__()
        self.configured = Configured()

    def on_train_epoch_end(self):
        self.configured.shift += 0.1
        self.configured.settings["scale"] *= 0.5

    def loss(self, batch):
        x, y = batch
        return super().loss((self.configured(x), y))


class WholeDict(Case):
    modes = FORWARD
    quick = True

    def __init__(self):
        super().__init__()
        self.weight_a, self.weight_b = 0.5, 0.25

    def on_train_epoch_end(self):
        self.weight_a = 1.5

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * sum(value for name, value in self.__dict__.items() if name.startswith("weight_"))


SHAPE_OF, ROWS = np.shape, int | None


class FixedInC(Case):
    """A function that numpy makes in C, and a union of types."""

    modes = STEP
    quick = True

    def training_step(self, batch, batch_idx):
        columns = SHAPE_OF([[1.0, 2.0]])[1]
        return self.loss(batch) * (columns if isinstance(len(batch[0]), ROWS) else 0.1)
