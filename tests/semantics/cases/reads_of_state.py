"""Steps that read the module's own state, which hooks and callbacks change."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import STEP, Case, On


class LossWeightByHook(Case):
    pair, epochs = True, 3
    modes = STEP

    def __init__(self):
        super().__init__()
        self.weight = 1.0

    def on_train_epoch_start(self):
        self.weight = 1 / (self.current_epoch + 1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weight


class BetaByCallback(Case):
    modes, captures, steps = STEP, 2, 4

    def __init__(self):
        super().__init__()
        self.beta = 0.0

    def callbacks(self):
        return [
            On(train_batch_start=lambda trainer, module, index: setattr(module, "beta", trainer.global_step * 0.01))
        ]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + self.beta * self.net[0].weight.square().sum()
        self.log("beta", self.beta)
        return loss


class DropoutRate(Case):
    """Rates of 0 and 1, whose results need no draw."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def on_train_epoch_start(self):
        self.drop.p = float(self.current_epoch % 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((self.drop(x), y))


class TensorAttribute(Case):
    """A tensor that is no buffer, replaced by a hook."""

    pair = True

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(1.0)

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = torch.tensor(1.0 + 0.5 * batch_idx)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scale


class TensorAttributeInPlace(Case):
    def __init__(self):
        super().__init__()
        self.classes = torch.ones(3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.classes[batch_idx % 3] += 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, weight=self.classes, reduction="sum") / self.rows


class TensorsInContainers(Case):
    def __init__(self):
        super().__init__()
        self.scales = {"loss": [torch.tensor(1.0)]}

    def on_train_epoch_end(self):
        self.scales["loss"][0] = torch.tensor(3.0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scales["loss"][0]


class NestedDict(Case):
    def __init__(self):
        super().__init__()
        self.config = {"beta": 1.0, "extra": {"on": False, "names": ["a"]}}

    def on_train_epoch_end(self):
        self.config["extra"]["on"] = True
        self.config["extra"]["names"].append("b")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * len(self.config["extra"]["names"])
        return loss + self.net[2].bias.square().sum() if self.config["extra"]["on"] else loss


@dataclass
class _Config:
    beta: float = 1.0
    schedule: list = field(default_factory=lambda: [1.0])


class DataclassConfig(Case):
    def __init__(self):
        super().__init__()
        self.config = _Config()

    def callbacks(self):
        def change(trainer, module, index):
            module.config.beta /= 2
            module.config.schedule[0] += 1

        return [On(train_epoch_end=change)]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.config.beta * self.config.schedule[0]


class HParams(Case):
    def __init__(self, beta=1.0):
        super().__init__()
        self.save_hyperparameters()

    def on_train_epoch_end(self):
        self.hparams.beta = 0.25

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.hparams.beta


class _Schedule:
    def __init__(self):
        self.count = 0

    @property
    def value(self):
        return 1 / (1 + self.count)


class ScheduleObject(Case):
    """A property of an object that another hook advances."""

    quick = True

    def __init__(self):
        super().__init__()
        self.schedule = _Schedule()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule.count += 1

    def training_step(self, batch, batch_idx):
        self.log("value", self.schedule.value)
        return self.loss(batch) * self.schedule.value


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor, self.flags = nn.Linear(4, 3), 1.0, SimpleNamespace(square=False)

    def forward(self, x):
        out = self.linear(x) * self.factor
        return out.square() if self.flags.square else out


class SubmoduleAttribute(Case):
    """A number and a flag deep inside of a submodule."""

    pair = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(_Scaled(), nn.Tanh())

    def on_train_epoch_start(self):
        self.net[0].factor = 1.0 + self.current_epoch

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].flags.square = batch_idx == 1


class PartialWithMutable(Case):
    def __init__(self):
        super().__init__()
        self.options = {"scale": 1.0}
        self.weigh = partial(self.scaled, options=self.options)

    @staticmethod
    def scaled(loss, options):
        return loss * options["scale"]

    def on_train_epoch_end(self):
        self.options["scale"] = 0.3

    def training_step(self, batch, batch_idx):
        return self.weigh(self.loss(batch))


class NumpyState(Case):
    """An array that a hook changes in place."""

    def __init__(self):
        super().__init__()
        self.table = np.array([1.0, 1.0])

    def on_train_epoch_end(self):
        self.table[1] = 4.0

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float(self.table[1])


class NumpyToTensor(NumpyState):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * torch.from_numpy(self.table).float().prod()


class CurriculumList(Case):
    def __init__(self):
        super().__init__()
        self.curriculum = [4, 2, 3]

    def on_train_epoch_end(self):
        self.curriculum.pop(0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((F.pad(x[:, : self.curriculum[0]], (0, 4 - self.curriculum[0])), y))


class LossFunctionReplaced(Case):
    def __init__(self):
        super().__init__()
        self.criterion = F.cross_entropy

    def on_train_epoch_end(self):
        self.criterion = F.multi_margin_loss

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self.net(x), y)


class HeadChosenByName(Case):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        self.active = "a"

    def on_train_batch_start(self, batch, batch_idx):
        self.active = "ab"[batch_idx % 2]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.heads[self.active](self.net(x)), y)


class Phase(Enum):
    WARM = 1
    FULL = 2


class EnumPhase(Case):
    def __init__(self):
        super().__init__()
        self.phase = Phase.WARM

    def on_train_epoch_end(self):
        self.phase = Phase.FULL

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if self.phase is Phase.WARM else loss * 2


class AttributeThatAppears(Case):
    def on_train_epoch_end(self):
        self.late = 3.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        loss = loss * 2 if hasattr(self, "late") else loss
        return loss * getattr(self, "late", 1.0)


class FrozenFlag(Case):
    """A submodule that is put into evaluation by a hook, and a step that asks."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def on_train_epoch_start(self):
        self.drop.train(self.current_epoch == 0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss((self.drop(x), y))
        return loss if self.drop.training else loss * 0.5


class SetMembership(Case):
    def __init__(self):
        super().__init__()
        self.skip = set()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.skip.add(batch_idx)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 0.1 if len(self.skip) > 1 else loss


class Environment(Case):
    @classmethod
    def reset(cls):
        os.environ.pop("CASE_SCALE", None)

    def on_train_epoch_end(self):
        os.environ["CASE_SCALE"] = "0.25"

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float(os.environ.get("CASE_SCALE", "1.0"))
