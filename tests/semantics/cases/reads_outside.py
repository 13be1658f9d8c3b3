"""Steps that read what does not lie on the module: closures, globals, class attributes, hooks, modes of torch."""

from __future__ import annotations

import itertools
import random
import time
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from tests.semantics.base import Case, On

KNOBS = {"scale": 1.0}
LIST = [1.0]


class Globals(Case):
    pair = True

    @classmethod
    def reset(cls):
        KNOBS["scale"], LIST[0] = 1.0, 1.0

    def on_train_epoch_end(self):
        KNOBS["scale"], LIST[0] = 0.5, 3.0

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * KNOBS["scale"] * LIST[0]


class ClassAttribute(Case):
    quick = True
    scale: ClassVar = 1.0

    @classmethod
    def reset(cls):
        cls.scale = 1.0

    def on_train_epoch_end(self):
        type(self).scale = 0.2

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.scale


class Closure(Case):
    """A function made in `__init__` whose variable another closure changes."""

    def __init__(self):
        super().__init__()
        factor = 1.0

        def scaled(loss):
            return loss * factor

        def change():
            nonlocal factor
            factor /= 2

        self.scaled, self.change = scaled, change

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.change()

    def training_step(self, batch, batch_idx):
        return self.scaled(self.loss(batch))


class NonlocalCounter(Case):
    """A closure that counts its calls: read and written in the step."""

    quick = True

    def __init__(self):
        super().__init__()
        calls = 0

        def factor():
            nonlocal calls
            calls += 1
            return 1 / calls

        self.factor = factor

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.factor()


class Cycle(Case):
    """An iterator that each step advances."""

    pair = True

    def __init__(self):
        super().__init__()
        self.weights = itertools.cycle([1.0, 0.5, 2.0, 0.1])

    def training_step(self, batch, batch_idx):
        weight = next(self.weights)
        self.log("weight", weight)
        return self.loss(batch) * weight


class Count(Case):
    def __init__(self):
        super().__init__()
        self.counter = itertools.count(1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / next(self.counter)


class GeneratorObject(Case):
    def __init__(self):
        super().__init__()
        self.values = (1 / (i + 1) for i in itertools.count())

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.values)


class DefaultArgument(Case):
    """A mutable default of a function: state that belongs to the function."""

    def __init__(self):
        super().__init__()

        def remember(value, seen=[]):  # noqa: B006
            seen.append(value)
            return len(seen)

        self.remember = remember

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.remember(1)


class OneCodeManyClosures(Case):
    """Functions made by one function: each has a closure of its own, and one of them counts."""

    pair = True

    def __init__(self):
        super().__init__()

        def make(scale):
            state = {"scale": scale}

            def scaled(value):
                return value * state["scale"]

            return scaled, state

        (self.first, _), (self.second, self.moving) = make(1.0), make(0.5)

    def on_train_batch_end(self, *args):
        self.moving["scale"] *= 1.5

    def training_step(self, batch, batch_idx):
        return self.first(self.loss(batch)) + self.second(self.loss(batch))


class OneCodeManyDefaults(Case):
    """Functions of one code whose defaults are lists of their own; both change theirs."""

    def __init__(self):
        super().__init__()

        def make():
            def remember(value, seen=[]):  # noqa: B006
                seen.append(value)
                return len(seen)

            return remember

        self.others, self.remember = [make() for _ in range(3)], make()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.remember(1)


class MethodReplaced(Case):
    """A method put on the instance in the middle of training."""

    def on_train_epoch_end(self):
        self.loss = lambda batch: Case.loss(self, batch) * 0.1


class ForwardHookAdded(Case):
    quick = True

    def on_train_epoch_end(self):
        self.net[0].register_forward_hook(lambda module, args, out: out * 2)


class ForwardHookWithState(Case):
    """A hook whose closure another hook changes."""

    def __init__(self):
        super().__init__()
        self.gain = {"by": 1.0}
        self.net[0].register_forward_hook(lambda module, args, out: out * self.gain["by"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.gain["by"] += 1


class ForwardHookRemoved(Case):
    def __init__(self):
        super().__init__()
        self.handle = self.net[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))

    def on_train_epoch_end(self):
        self.handle.remove()


class ForwardHookKeeps(Case):
    """Features kept by a hook, read in the step."""

    pair = True
    keeps = ("features",)

    def __init__(self):
        super().__init__()
        self.features = {}
        self.net[1].register_forward_hook(lambda module, args, out: self.features.update(hidden=out))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * self.features["hidden"].square().mean()


class GradientHookOnTensor(Case):
    def __init__(self):
        super().__init__()
        self.reverse = 1.0

    def on_train_epoch_end(self):
        self.reverse = -1.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        hidden.register_hook(lambda gradient: gradient * self.reverse)
        return nn.functional.cross_entropy(self.net[2](hidden), y)


class GradientHookReads(Case):
    """A hook on an activation that keeps its gradient's norm."""

    keeps = ("norms",)

    def __init__(self):
        super().__init__()
        self.norms = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[0](x)
        hidden.register_hook(lambda gradient: self.norms.append(gradient.norm().detach()))
        return nn.functional.cross_entropy(self.net[2](self.net[1](hidden)), y)


class GradientHookOnParameter(Case):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def on_fit_start(self):
        self.net[0].weight.register_hook(lambda gradient: gradient * self.scale)

    def on_train_epoch_end(self):
        self.scale = 0.0


class FullBackwardHook(Case):
    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []
        self.net[2].register_full_backward_hook(lambda module, into, out: self.seen.append(out[0].norm().detach()))


class GradModeRead(Case):
    """One step for training and validation that asks torch which it is."""

    validates = True

    def training_step(self, batch, batch_idx):
        return self.shared(batch)

    def validation_step(self, batch, batch_idx):
        return self.shared(batch)

    def shared(self, batch):
        loss = self.loss(batch)
        self.log("loss" if torch.is_grad_enabled() else "val_loss", loss * (1 if torch.is_grad_enabled() else 10))
        return loss


class GradModeChanged(Case):
    def __init__(self):
        super().__init__()
        self.learn = False

    def on_train_epoch_end(self):
        self.learn = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.set_grad_enabled(self.learn):
            hidden = self.net[1](self.net[0](x))
        return nn.functional.cross_entropy(self.net[2](hidden), y)


class DefaultDtype(Case):
    @classmethod
    def reset(cls):
        torch.set_default_dtype(torch.float32)

    def on_train_batch_start(self, batch, batch_idx):
        torch.set_default_dtype(torch.float64 if batch_idx == 1 else torch.float32)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.set_default_dtype(torch.float32)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + torch.zeros(1).element_size() / 8)


class Clock(Case):
    """The seconds since the start: another number at each step."""

    uncompared = ("elapsed",)
    start: ClassVar = 0.0

    def training_step(self, batch, batch_idx):
        type(self).start = type(self).start or time.perf_counter()
        self.log("elapsed", time.perf_counter() - self.start)
        return self.loss(batch)

    @classmethod
    def reset(cls):
        cls.start = 0.0

    @classmethod
    def check(cls, outcome):
        seen = [row["elapsed"] for row in outcome.logged]
        assert all(earlier < later for earlier, later in itertools.pairwise(seen)), seen


class CallbackState(Case):
    """The step asks a callback of the Trainer."""

    def callbacks(self):
        callback = On(train_batch_start=lambda trainer, module, index: setattr(callback, "level", index + 1.0))
        callback.level = 0.0
        return [callback]

    def training_step(self, batch, batch_idx):
        level = next(callback.level for callback in self.trainer.callbacks if isinstance(callback, On))
        return self.loss(batch) * level


class ScheduledSampling(Case):
    """A draw from the module's own generator against a probability that falls."""

    quick = True

    def __init__(self):
        super().__init__()
        self.rng, self.probability = random.Random(3), 0.9

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.probability *= 0.8

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 2 if self.rng.random() < self.probability else loss


class ReadOnlyView(Case):
    """A read-only view of a dict that changes."""

    def __init__(self):
        super().__init__()
        self._options = {"scale": 1.0}
        self.options = MappingProxyType(self._options)

    def on_train_epoch_end(self):
        self._options["scale"] = 0.4

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.options["scale"]
