"""What a step may not do while it is captured is refused, with its line, and undone."""

from __future__ import annotations

import random
import time
import uuid

import numpy as np
import pytest
import torch

from lightning_autoparallel.errors import CaptureError
from tests.unit.pipeline._steps import Net, Told, run_captured

SCALE = {"value": 1.0}


class Config:
    def __init__(self):
        self.beta = 1.0


class Numpy(Net):
    def step(self, x, i):
        return self.loss(x) * np.random.rand()


class Python(Net):
    def step(self, x, i):
        return self.loss(x) * random.random()


class Clock(Net):
    def step(self, x, i):
        return self.loss(x) * time.time()


class Id(Net):
    def step(self, x, i):
        self.name = uuid.uuid4().hex
        return self.loss(x)


class Generator(Net):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def step(self, x, i):
        return self.loss(x) * torch.rand(1, generator=self.generator).sum()


class Iterates(Net):
    def __init__(self):
        super().__init__()
        self.weights = iter(range(100))

    def step(self, x, i):
        return self.loss(x) * next(self.weights)


class Ranks(Net):
    def step(self, x, i):
        return self.loss(x) * torch.distributed.get_world_size()


class ChangesGlobals(Net):
    def step(self, x, i):
        SCALE["calls"] = 1
        return self.loss(x)


class ChangesATensor(Net):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def step(self, x, i):
        loss = self.loss(x)
        self.total += loss.detach()
        return loss


class ReadsAsAnArray(Net):
    """While the step is captured, numpy would find other memory there than the tensor's."""

    def __init__(self):
        super().__init__()
        self.weights = torch.ones(3)

    def step(self, x, i):
        return self.loss(x) * float(self.weights.numpy()[0])


class ConvertsToAnArray(ReadsAsAnArray):
    def step(self, x, i):
        return self.loss(x) * float(np.asarray(self.weights)[0])


class KeepsAnObject(Net):
    def step(self, x, i):
        self.config = Config()
        return self.loss(x)


class Exactly(Net):
    def step(self, x, i):
        return self.loss(x) * torch.ones(int(i) + 1).mean()


class Opaque(Net):
    def batch(self, i):
        return {"x": super().batch(i), "object": Config()}

    def step(self, batch, i):
        return self.loss(batch["x"]) * batch["object"].beta


class Holds(Net):
    def step(self, x, i):
        try:
            return self.loss(x) * time.time()
        except Exception:
            return self.loss(x)


class ChangesAParameter(Net):
    def step(self, x, i):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.loss(x)


class DifferentiatesTheBatch(Net):
    def step(self, x, i):
        x.requires_grad_()
        loss = self.loss(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class OwnGenerator(Net):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(3)

    def step(self, x, i):
        return self.loss(x) * self.rng.random()


class AddsToTheBatch(Net):
    def batch(self, i):
        return {"x": super().batch(i)}

    def step(self, batch, i):
        loss = self.loss(batch["x"])
        batch["loss"] = loss
        return loss


class SetsData(Net):
    def step(self, x, i):
        self.linear.weight.data = self.linear.weight.data * 0.5
        return self.loss(x)


REFUSED = [
    (OwnGenerator, "reads self.rng (Random), which moves on"),
    (AddsToTheBatch, "puts something into what it is given"),
    (SetsData, "goes around autograd (.data)"),
    (ChangesAParameter, "changes the parameter linear.weight in place"),
    (DifferentiatesTheBatch, "asks for the gradient of batch leaf"),
    (Numpy, "draws from numpy.random"),
    (Python, "draws from Python's random"),
    (Clock, "asks for the time"),
    (Id, "makes an id"),
    (Generator, "draws from a torch.Generator"),
    (Iterates, "moves on when it is used"),
    (Ranks, "asks for the ranks"),
    (ChangesGlobals, "changes test_python_refused.SCALE"),
    (ChangesATensor, "changes a tensor in place"),
    (ReadsAsAnArray, "reads a tensor's value (numpy)"),
    (ConvertsToAnArray, "reads a tensor's value (__array__)"),
    (KeepsAnObject, "keeps a Config in self.config"),
    (Exactly, "decides by `(int(i) + 1)` differently"),
    (Opaque, "reads batch leaf 'object', a Config"),
    (Holds, "asks for the time"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_would_be_frozen_or_dropped_is_refused(kind: type[Net], message: str):
    scale, state = dict(SCALE), random.getstate()
    with pytest.raises(CaptureError) as caught:
        run_captured(kind(), Told())
    assert message in str(caught.value)
    assert scale == SCALE and random.getstate() == state
