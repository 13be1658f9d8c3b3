"""Options of the Trainer that decide how much of an epoch runs, and when the optimizer steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close

from tests.distributed.jobs import MESH, Net, Outcome, Validated, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Counts(Callback):
    """How many batches and optimizer steps ran, and the validation losses."""

    def __init__(self) -> None:
        self.training = self.validation = self.optimizer = 0

    def on_train_batch_end(self, *args):
        self.training += 1

    def on_validation_batch_end(self, *args):
        self.validation += 1

    def on_before_optimizer_step(self, *args):
        self.optimizer += 1


class Counted(Validated):
    """Ten batches to train and to validate on, parameters and loss logged."""

    steps, epochs = 10, 2

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def callbacks(self) -> list[Callback]:
        return [self.counts]

    def extra(self) -> Any:
        return self.counts.training, self.counts.validation, self.counts.optimizer


class Accumulates(Counted):
    """Windows of four in epochs of ten: the last window of each is of two."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 4}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-4)


class AccumulatesReplicated(Accumulates):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class ClipsEachMicroBatch(AccumulatesReplicated):
    """What a module clips within a window is what all ranks' rows gave so far."""

    clipping: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "norm"}

    def on_after_backward(self):
        self.clip_gradients(self.optimizers(use_pl_optimizer=False), **self.clipping)


class ClipsEachValue(ClipsEachMicroBatch):
    clipping: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}


class ClipsInPython(ClipsEachMicroBatch):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp", "capture": "forward"}


class FastDevRun(Counted):
    trainer_options: ClassVar[Mapping[str, Any]] = {"fast_dev_run": True}


class Limited(Counted):
    trainer_options: ClassVar[Mapping[str, Any]] = {"limit_train_batches": 3, "limit_val_batches": 2}


class LimitedByFraction(Counted):
    trainer_options: ClassVar[Mapping[str, Any]] = {"limit_train_batches": 0.5, "limit_val_batches": 0.2}


class NotValidated(Counted):
    trainer_options: ClassVar[Mapping[str, Any]] = {"limit_train_batches": 1.0, "limit_val_batches": 0}


class NotTrained(Counted):
    trainer_options: ClassVar[Mapping[str, Any]] = {"limit_train_batches": 0}


def compared(kind: type[Net], worlds: Worlds, mesh: Mapping[str, int] = MESH) -> Outcome:
    """What one device gave, which the ranks of a world gave too."""
    expected = train(kind, None)
    world = 2 if mesh is MESH else 4
    outcomes = worlds(world).run(train, kind, mesh, world)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        assert outcome.extra == expected.extra
    return expected


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        (Accumulates, MESH),
        (Accumulates, {"dp_replicate": 2, "dp_shard": 2}),
        (AccumulatesReplicated, MESH),
        (ClipsEachMicroBatch, MESH),
        (ClipsEachMicroBatch, {"dp_replicate": 2, "dp_shard": 2}),
        (ClipsEachValue, MESH),
    ],
)
def test_gradients_are_accumulated(kind, mesh, worlds: Worlds) -> None:
    expected = compared(kind, worlds, mesh)
    assert expected.extra == (20, 20, 6)


def test_forward_mode_clips_what_all_ranks_added_so_far(worlds: Worlds) -> None:
    expected = train(ClipsInPython, None)
    for outcome in worlds(2).run(train, ClipsInPython, MESH, 2):
        assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (FastDevRun, (1, 1, 1)),
        (Limited, (6, 4, 6)),
        (LimitedByFraction, (10, 4, 10)),
        (NotValidated, (20, 0, 20)),
        (NotTrained, (0, 0, 0)),
    ],
)
def test_as_many_batches_run_as_on_one_device(kind, counts: tuple[int, int, int], worlds: Worlds) -> None:
    assert compared(kind, worlds).extra == counts


class Watched(Net):
    trainer_options: ClassVar = {"detect_anomaly": True}


class GivesNan(Watched):
    """On rank 1 alone a shard of a gradient is nan."""

    def loss(self, batch):
        return super().loss(batch) + (self.net[0].weight[-1:] * 0).sqrt().sum()


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(10), nn.Tanh(), nn.Linear(10, 3))


@pytest.mark.parametrize("options", [{"profiler": "pytorch"}, {"detect_anomaly": True}], ids=str)
def test_instruments_change_nothing(options, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train_with, options)
    assert_equals_one_device(outcomes, train(Net, None))


def train_with(options: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return train(type("Observed", (Net,), {"trainer_options": {**options, "default_root_dir": folder}}), MESH)


def nan_of() -> str:
    try:
        train(GivesNan, MESH)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_anomalies_stop_all_ranks(worlds: Worlds) -> None:
    for text in worlds(2).run(nan_of):
        assert "returned nan values" in text


def test_lazy_modules_are_refused(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, Lazy):
        assert text.startswith("ConfigError: module 'net.0' (LazyLinear) is lazy and its parameters have no shape yet")
