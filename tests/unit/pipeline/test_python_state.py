"""What a step's Python reads is guarded or fed, what it writes happens at each step: as in plain Python."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.pipeline._steps import Net, Told, assert_equal, plain, run_captured, run_plainly

SCALE = {"value": 1.0}
FACTOR = 1.0
CALLS = 0


def set_calls(value):
    globals()["CALLS"] = value


class Weight(Net):
    def __init__(self):
        super().__init__()
        self.alpha = 1.0

    def between(self, i):
        self.alpha = 1.0 + i

    def step(self, x, i):
        return self.loss(x) * self.alpha


class Branch(Net):
    flag = False

    def between(self, i):
        self.flag = i >= 3

    def step(self, x, i):
        return self.loss(x) * (2 if self.flag else 1)


class ClassValue(Net):
    factor = 1.0

    def between(self, i):
        type(self).factor = 2.0 if i >= 3 else 1.0

    def step(self, x, i):
        return self.loss(x) * self.factor


class Config:
    def __init__(self):
        self.beta, self.names = 1.0, ["a"]


class OfAnObject(Net):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def between(self, i):
        self.config.beta = i / 10

    def step(self, x, i):
        return self.loss(x) * self.config.beta


class OfAProperty(OfAnObject):
    @property
    def scaled(self):
        return self.config.beta * 2

    def step(self, x, i):
        return self.loss(x) * self.scaled


class OfADict(Net):
    def __init__(self):
        super().__init__()
        self.groups = [{"lr": 0.1, "other": 0}]

    def between(self, i):
        self.groups[0]["lr"] *= 0.5
        self.groups[0]["other"] += 1

    def step(self, x, i):
        return {"loss": self.loss(x), "rate": self.groups[0]["lr"]}


class OfANewList(OfADict):
    def between(self, i):
        self.groups = [{"lr": 0.1 * i}]


class OfANamespace(Net):
    def __init__(self):
        super().__init__()
        self.options = SimpleNamespace(mode="mean")

    def between(self, i):
        self.options.mode = "mean" if i < 3 else "sum"

    def step(self, x, i):
        return getattr(self.linear(x).square(), self.options.mode)()


class OfAGlobal(Net):
    def between(self, i):
        globals()["FACTOR"] = 2.0 if i >= 3 else 1.0
        SCALE["value"] = 3.0 if i >= 5 else 1.0

    def step(self, x, i):
        return self.loss(x) * FACTOR * SCALE["value"]


def scaled_by(box):
    factor = 1.0

    def set_factor(value):
        nonlocal factor
        factor = value

    def scale(loss):
        return loss * factor * box[0]

    return scale, set_factor


class OfAClosure(Net):
    def __init__(self):
        super().__init__()
        self.box = [1.0]
        self.scale, self.set_factor = scaled_by(self.box)

    def between(self, i):
        self.set_factor(2.0 if i >= 3 else 1.0)

    def step(self, x, i):
        return self.scale(self.loss(x))


class OfAChild(Net):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def between(self, i):
        self.dropout.p = 0.0 if i < 3 else 1.0

    def step(self, x, i):
        return self.dropout(self.linear(x)).square().mean() + self.loss(x)


class PlainTensor(Net):
    def __init__(self):
        super().__init__()
        self.weights = torch.ones(3)

    def between(self, i):
        self.weights = torch.full((3,), float(i))

    def step(self, x, i):
        return (self.linear(x).square() * self.weights).mean()


class PlainTensorInPlace(PlainTensor):
    def between(self, i):
        self.weights += 1


class ValueInPlace(Net):
    """Of the tensor the step reads the value, in Python."""

    def __init__(self):
        super().__init__()
        self.array = np.ones(2, dtype=np.float32)
        self.weights = torch.from_numpy(self.array)

    def between(self, i):
        if i == 3:
            self.weights.mul_(2)

    def step(self, x, i):
        return self.loss(x) * self.weights.tolist()[0]


class ValueThroughData(ValueInPlace):
    """Torch's version of the tensor stays what it was."""

    def between(self, i):
        if i == 3:
            self.weights.data.mul_(2)


class ValueThroughNumpy(ValueInPlace):
    def between(self, i):
        if i == 3:
            self.array *= 2


class ValueIsNotANumber(ValueInPlace):
    """It is not equal to itself, and has not changed."""

    def between(self, i):
        self.weights.data[1] = torch.nan


class AddedAttribute(Net):
    def between(self, i):
        if i == 3:
            self.extra_weight = 2.0

    def step(self, x, i):
        return self.loss(x) * getattr(self, "extra_weight", 1.0)


class CounterInArithmetic(Net):
    def step(self, x, i):
        return {"loss": self.loss(x) * (1 + i / 10) + i, "warm": min(1.0, (i + 1) / 1000), "i": -i}


class CounterAsTensor(Net):
    def step(self, x, i):
        weight = torch.tensor(i) + torch.tensor([1.0, i]).sum() + torch.full((2,), i).sum()
        return self.loss(x) * weight + torch.zeros(2).fill_(i).sum() + x.new_tensor(i) * math.exp(-i)


class CounterDtypes(Net):
    def step(self, x, i):
        half, whole = x.to(torch.bfloat16), (x * 5).int()
        results = [half * (i / 2), whole * i, whole * (i / 2), whole // (i + 1), (i + 1) ** whole.abs(), 1 - half * i]
        results += [torch.tensor(2.0) * i, torch.tensor(2) * i, torch.tensor(2) * (i / 2), torch.where(x > 0, x, i)]
        results += [x.clamp(max=i / 10), x > i, x.masked_fill(x > 0, i), torch.add(x, x, alpha=i), i - x, i / (x + 9)]
        return {"loss": self.loss(x), **{str(n): value for n, value in enumerate(results)}}


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.n, self.last, self.best = 0, None, 0.0
        self.stats = {"n": 0, "loss": None}

    def step(self, x, i):
        loss = self.loss(x)
        self.n += 1
        self.stats["n"] = self.stats["n"] + 2
        self.stats["loss"] = loss.detach()
        self.pair = (loss, [i])
        return loss * self.n

    def seen(self):
        return [self.n, self.stats, self.pair]


class Appends(Net):
    def __init__(self):
        super().__init__()
        self.outs, self.nested = [], {"train": []}

    def step(self, x, i):
        loss = self.loss(x)
        self.outs.append({"loss": loss.detach(), "rows": x[:, 0], "i": i})
        self.nested["train"].append(loss.detach())
        return loss

    def seen(self):
        return [self.outs, self.nested]


class Shared:
    def __init__(self):
        self.count, self.loss = 0, None


class WritesElsewhere(Net):
    def __init__(self):
        super().__init__()
        self.shared = Shared()

    def step(self, x, i):
        self.shared.count = self.shared.count + 1
        self.shared.loss = self.loss(x)
        return self.shared.loss

    def seen(self):
        return [self.shared.count, self.shared.loss]


class Caches(Net):
    cache = None

    def step(self, x, i):
        if self.cache is None:
            self.cache = torch.arange(3.0)
        return (self.linear(x) * self.cache).square().mean()

    def seen(self):
        return self.cache


class Deletes(Net):
    def between(self, i):
        self.temporary, self.table = i, {"a": i, "b": i}

    def step(self, x, i):
        del self.temporary
        self.table.pop("a")
        return self.loss(x)

    def seen(self):
        return [hasattr(self, "temporary"), self.table]


class Strings(Net):
    def batch(self, i):
        return {"x": super().batch(i), "id": f"row {i}", "kind": "odd" if i % 2 else "even", "n": i}

    def step(self, batch, i):
        loss = self.loss(batch["x"])
        if batch["kind"] == "odd":
            loss = loss * 2
        return {"loss": loss * batch["n"], "id": batch["id"], "index": i}


class ChangesTheBatch(Net):
    def __init__(self):
        super().__init__()
        self.given = {i: Net.batch(self, i) for i in range(6)}

    def batch(self, i):
        return self.given[i]

    def step(self, x, i):
        x[x > 0] = 0.5
        x[:, 0] += i
        return self.loss(x)

    def seen(self):
        return list(self.given.values())


class ReadsStringsInC(Strings):
    def batch(self, i):
        return {"x": Net.batch(self, i), "kind": "odd" if i % 2 else "even"}

    def step(self, batch, i):
        return self.loss(batch["x"]) * len("-".join([batch["kind"], "x"]))


class OfHyperparameters(Net):
    """A dict of a class of its own, and globals: numbers in them become inputs as well."""

    def __init__(self):
        super().__init__()
        self.hparams = Attributes(beta=1.0)

    def between(self, i):
        self.hparams.beta = 1.0 + i
        SCALE["value"] = float(i)

    def step(self, x, i):
        return self.loss(x) * self.hparams.beta * SCALE["value"]


class Attributes(dict):
    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Blocks(Net):
    """Equal blocks are traced once; what one of them reads is read of each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def between(self, i):
        self.blocks[3].config.scale = 2.0 if i == 3 else 1.0
        self.blocks[2].add = i == 4

    def step(self, x, i):
        for block in self.blocks:
            x = block(x)
        return self.loss(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.add, self.config = nn.Linear(3, 3), False, SimpleNamespace(scale=1.0)

    def forward(self, x):
        x = self.inner(x) * self.config.scale
        return x + 1 if self.add else x


def counting():
    calls = 0

    def factor():
        nonlocal calls
        calls += 1
        return 1 / calls

    return factor


class CountsInAClosure(Net):
    def __init__(self):
        super().__init__()
        self.factor = counting()

    def step(self, x, i):
        return self.loss(x) * self.factor()

    def seen(self):
        return self.factor()


class CountsInAGlobal(Net):
    def step(self, x, i):
        global CALLS
        CALLS = CALLS + 1
        return self.loss(x) / CALLS


class Converts(Net):
    def __init__(self):
        super().__init__()
        self.n = 0

    def step(self, x, i):
        self.n += 1
        return {"loss": self.loss(x) / float(self.n), "half": int(self.n / 2), "is": isinstance(float(i), (float, str))}


CASES = [
    (Weight, 2),
    (Branch, 2),
    (ClassValue, 2),
    (OfAnObject, 2),
    (OfAProperty, 2),
    (OfADict, 2),
    (OfANewList, 2),
    (OfANamespace, 2),
    (OfAGlobal, 3),
    (OfAClosure, 2),
    (OfAChild, 2),
    (PlainTensor, 1),
    (PlainTensorInPlace, 1),
    (ValueInPlace, 2),
    (ValueThroughData, 2),
    (ValueThroughNumpy, 2),
    (ValueIsNotANumber, 1),
    (AddedAttribute, 2),
    (CounterInArithmetic, 1),
    (CounterAsTensor, 1),
    (CounterDtypes, 1),
    (Counts, 1),
    (Appends, 1),
    (WritesElsewhere, 1),
    (Caches, 2),
    (Deletes, 1),
    (Strings, 2),
    (ChangesTheBatch, 1),
    (CountsInAClosure, 1),
    (CountsInAGlobal, 1),
    (Converts, 1),
    (ReadsStringsInC, 2),
    (OfHyperparameters, 2),
    (Blocks, 3),
]


@pytest.mark.parametrize(("kind", "captures"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_step_is_as_in_plain_python(kind: type[Net], captures: int):
    torch.manual_seed(0)
    module, told = kind(), Told()
    torch.manual_seed(0)
    eager = kind()
    set_calls(0)
    expected = run_plainly(eager)
    set_calls(0)
    assert_equal(run_captured(module, told), expected)
    assert_equal(plain(module.seen()), plain(eager.seen()))
    assert told.captures == captures, told.warnings
