"""What lies outside of a step's module and batch: classes, settings, the environment, warnings, log records, hooks."""

from __future__ import annotations

import datetime
import heapq
import logging
import os
import sys
import warnings
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_autoparallel.errors import CaptureError, ConfigError
from tests.unit.pipeline import _settings
from tests.unit.pipeline._steps import Net, Told, assert_equal, run_captured, run_plainly

LOG = logging.Logger("step")


class Options:
    scale = 1.0


class OfTheClass(Net):
    factor = 1.0

    def between(self, i):
        type(self).factor = 2.0 if i >= 3 else 1.0

    def step(self, x, i):
        return self.loss(x) * type(self).factor


class OfAGlobalClass(Net):
    def between(self, i):
        Options.scale = 2.0 if i >= 3 else 1.0

    def step(self, x, i):
        return self.loss(x) * Options.scale


class OfAnImport(Net):
    def between(self, i):
        _settings.SCALE = 2.0 if i >= 3 else 1.0
        _settings.OPTIONS.rate = 3.0 if i >= 5 else 1.0

    def step(self, x, i):
        from tests.unit.pipeline import _settings as settings
        from tests.unit.pipeline._settings import SCALE

        return self.loss(x) * SCALE * settings.OPTIONS.rate


def double(self):
    return 2.0


def once(self):
    return 1.0


class OfAMethod(Net):
    weight = once

    def between(self, i):
        type(self).weight = double if i >= 3 else once

    def step(self, x, i):
        return self.loss(x) * self.weight()


class OfTheEnvironment(Net):
    def between(self, i):
        os.environ["AUTOPARALLEL_TEST_SCALE"] = "2" if i >= 3 else "1"

    def step(self, x, i):
        return self.loss(x) * float(os.environ["AUTOPARALLEL_TEST_SCALE"]) * float(os.getenv("NO_SUCH_SCALE", "1"))


class OfTheDefaultDtype(Net):
    def between(self, i):
        torch.set_default_dtype(torch.float64 if i == 3 else torch.float32)

    def batch(self, i):
        return super().batch(i).float()

    def step(self, x, i):
        return self.loss(x) * torch.ones(1).element_size()


class ReplacesAModule(Net):
    def __init__(self):
        super().__init__()
        self.post = nn.Identity()

    def between(self, i):
        self.post = nn.Softplus() if i == 3 else self.post

    def step(self, x, i):
        return self.post(self.linear(x)).mean()


class NamesByTheBatch(Net):
    """Text of a number of the batch: a head for each task."""

    def __init__(self):
        super().__init__()
        self.weights = {"task0": 1.0, "task1": 2.0}

    def batch(self, i):
        return {"x": super().batch(i), "task": i % 2}

    def step(self, batch, i):
        return self.loss(batch["x"]) * self.weights[f"task{batch['task']}"]


CASES = [
    (OfTheClass, 2),
    (OfAGlobalClass, 2),
    (OfAnImport, 3),
    (OfAMethod, 2),
    (OfTheEnvironment, 2),
    (OfTheDefaultDtype, 2),
    (ReplacesAModule, 2),
    (NamesByTheBatch, 2),
]


@pytest.fixture(autouse=True)
def settings_kept():
    yield
    torch.set_default_dtype(torch.float32)
    os.environ.pop("AUTOPARALLEL_TEST_SCALE", None)
    OfTheClass.factor = Options.scale = _settings.SCALE = _settings.OPTIONS.rate = 1.0


@pytest.mark.parametrize(("kind", "captures"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_step_is_as_in_plain_python(kind: type[Net], captures: int):
    torch.manual_seed(0)
    module, told = kind(), Told()
    torch.manual_seed(0)
    expected = run_plainly(kind())
    assert_equal(run_captured(module, told), expected)
    assert told.captures == captures, told.warnings


class Speaks(Net):
    def step(self, x, i):
        LOG.info("step %d of %s", i * 1, "many")
        warnings.warn("slow", stacklevel=1)
        return self.loss(x)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.rows.append(record.getMessage())


def heard(run: Any) -> tuple[list[str], int]:
    """Log records, and how many warnings."""
    handler = Records()
    LOG.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    LOG.removeHandler(handler)
    return handler.rows, sum("slow" in str(warning.message) for warning in caught)


def test_what_is_said_is_said_at_each_step():
    rows, count = heard(lambda: run_plainly(Speaks()))
    assert rows == [f"step {i} of many" for i in range(6)] and count == 6
    assert heard(lambda: run_captured(Speaks(), Told())) == (rows, count)


class SpeaksOfALoss(Net):
    def step(self, x, i):
        LOG.info("loss %s", self.loss(x))
        return self.loss(x)


class KeepsInTheClass(Net):
    told: ClassVar = set()

    def step(self, x, i):
        self.told.add("hint")
        LOG.info("again")
        return self.loss(x)


class ReadsAGradient(Net):
    def step(self, x, i):
        return self.loss(x) * (2 if self.linear.weight.grad is not None else 1)


class HangsAHook(Net):
    def step(self, x, i):
        hidden = self.linear(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return hidden.mean()


class HasABackwardHook(Net):
    def __init__(self):
        super().__init__()
        self.linear.register_full_backward_hook(partial(print))


class Seeds(Net):
    def step(self, x, i):
        torch.manual_seed(3)
        return self.loss(x + torch.randn(3))


class SetsTheClass(Net):
    count = 0

    def step(self, x, i):
        type(self).count += 1
        return self.loss(x)


class ReturnsAnObject(Net):
    def step(self, x, i):
        return {"loss": self.loss(x), "options": Options()}


class TriesToRead(Net):
    def step(self, x, i):
        try:
            return self.loss(x) * float(x.mean())
        except Exception:
            return self.loss(x)


class Today(Net):
    def step(self, x, i):
        return self.loss(x) * datetime.datetime.now().second


class Writes(Net):
    def step(self, x, i):
        sys.__stdout__.write("")
        return self.loss(x)


class AllGlobals(Net):
    def step(self, x, i):
        return self.loss(x) * globals()["Options"].scale


class Memory(Net):
    def step(self, x, i):
        return self.loss(x) * (1 if x.data_ptr() == self.linear.weight.data_ptr() else 2)


class Heap(Net):
    def __init__(self):
        super().__init__()
        self.best = [5, 7]

    def step(self, x, i):
        heapq.heappush(self.best, 6)
        return self.loss(x)


class Saves(Net):
    def step(self, x, i):
        torch.save({}, "nowhere.pt")
        return self.loss(x)


REFUSED = [
    (SpeaksOfALoss, "writes a tensor, or a leaf of the batch, into a log record"),
    (KeepsInTheClass, "changes KeepsInTheClass.told in place"),
    (ReadsAGradient, "reads the gradient of a tensor"),
    (HangsAHook, "hangs a hook into the backward of a tensor"),
    (HasABackwardHook, "is a backward hook of self.linear"),
    (Seeds, "calls torch.manual_seed"),
    (SetsTheClass, "changes SetsTheClass.count in place"),
    (ReturnsAnObject, "returns a Options, which is made at capture only"),
    (TriesToRead, "reads a tensor's value (__float__), and goes on where that fails"),
    (Today, "asks for the time (datetime.now)"),
    (Writes, "reads or writes a file (write)"),
    (AllGlobals, "asks for all globals at once"),
    (Memory, "asks for the memory of a tensor"),
    (Heap, "changes self.best, which nothing tells of"),
    (Saves, "calls torch.save"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_would_be_frozen_or_dropped_is_refused(kind: type[Net], message: str):
    errors: list[str] = []

    def run() -> None:
        with pytest.raises(CaptureError) as caught:
            run_captured(kind(), Told())
        errors.append(str(caught.value))

    assert heard(run)[0] == []
    assert message in errors[0]
    assert SetsTheClass.count == 0 and not KeepsInTheClass.told


class ReplacesAParameter(Net):
    def between(self, i):
        if i == 3:
            self.linear = nn.Linear(3, 3)


def test_a_parameter_that_comes_too_late_is_refused():
    """It would train on each rank by itself."""
    with pytest.raises(ConfigError, match=r"parameter linear\.weight was made or replaced after training had begun"):
        run_captured(ReplacesAParameter(), Told())
