"""torchmetrics objects in steps, hooks and callbacks, and numbers of Python, logged with and without us."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback
from torch import nn

from tests.conformance.saved import MESHES, RULES
from tests.distributed.jobs import Net, assert_equals_one_device, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
TP: dict[str, Any] = {"plan": {"base": "fsdp", "rules": RULES}}


class Measured(Net):
    """Metrics that are counts, means and lists of rows; what they gave is kept in ``seen``."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(**CLASSES)
        self.total = torchmetrics.SumMetric()
        self.auroc = torchmetrics.AUROC(**CLASSES)
        kinds = {"precision": torchmetrics.Precision, "recall": torchmetrics.Recall}
        made = {name: kind(**CLASSES, average="macro") for name, kind in kinds.items()}
        self.collection = torchmetrics.MetricCollection(made, prefix="of_")
        self.seen: list[Any] = []

    @property
    def measures(self):
        return self.accuracy, self.total, self.auroc, self.collection

    def val_dataloader(self):
        mesh = getattr(self.trainer.strategy, "mesh", None)
        return self.loader(*((0, 1) if mesh is None else (mesh.data_parallel_rank, mesh.data_parallel_size)))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.log("val", F.cross_entropy(scores, y), sync_dist=True)
        return {"scores": scores, "y": y, "x": x}

    def measure(self, scores, y, x):
        self.accuracy.update(scores, y)
        self.total.update(x[:, 0])
        self.auroc.update(scores, y)
        self.collection.update(scores, y)

    def compute(self):
        self.log_dict({"accuracy": self.accuracy.compute(), "total": self.total.compute()})
        self.log_dict({"auroc": self.auroc.compute(), **self.collection.compute()})
        for metric in self.measures:
            metric.reset()

    def extra(self):
        return self.seen


class InSteps(Measured):
    """Updated in the step, computed in a hook."""

    def validation_step(self, batch, batch_idx):
        self.measure(**super().validation_step(batch, batch_idx))

    def on_validation_epoch_end(self):
        self.compute()


class AsObjects(Measured):
    def validation_step(self, batch, batch_idx):
        self.measure(**super().validation_step(batch, batch_idx))
        self.log_dict({"accuracy": self.accuracy, "total": self.total, "auroc": self.auroc})
        self.log_dict(self.collection)


class InHooks(Measured):
    """Updated with what the step returned."""

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.measure(**outputs)

    def on_validation_epoch_end(self):
        self.compute()


class Keeps(Callback):
    """Metrics that no module knows of."""

    def __init__(self, seen: list[Any]) -> None:
        self.total, self.rows, self.seen = torchmetrics.SumMetric(), torchmetrics.CatMetric(), seen

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total.update(outputs["x"][:, 0])
        self.rows.update(outputs["x"][:, 0])

    def on_validation_epoch_end(self, trainer, pl_module):
        self.seen.append((self.total.compute(), self.rows.compute().sort().values))
        pl_module.log("kept", self.total.compute())
        self.total.reset()
        self.rows.reset()


class InCallbacks(Measured):
    def callbacks(self):
        return [Keeps(self.seen)]


class Wrapped(Measured):
    """Wrappers of metrics, and metrics in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.best = torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**CLASSES))
        self.by_class = torchmetrics.ClasswiseWrapper(torchmetrics.Accuracy(**CLASSES, average=None))
        self.running = torchmetrics.RunningMean(window=3)
        self.kinds = nn.ModuleDict({"f1": torchmetrics.F1Score(**CLASSES)})
        self.tracker = torchmetrics.MetricTracker(torchmetrics.Accuracy(**CLASSES))

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        for metric in (self.best, self.by_class, self.kinds["f1"], self.tracker):
            metric.update(scores, y)
        self.running.update(F.cross_entropy(scores, y))

    def on_validation_epoch_end(self):
        self.log_dict({**self.best.compute(), **self.by_class.compute(), "running": self.running.compute()})
        self.log_dict({"f1": self.kinds["f1"].compute(), "tracked": self.tracker.compute()})
        for metric in (self.best, self.by_class, self.kinds["f1"]):
            metric.reset()


class Numpy(Measured):
    """A metric of numpy: the step runs its own Python, on each rank's rows."""

    def validation_step(self, batch, batch_idx):
        scores, y = self.net(batch[0]), batch[1]
        self.log("right", float((scores.argmax(1).cpu().numpy() == y.cpu().numpy()).mean()), sync_dist=True)
        self.accuracy.update(scores, y)
        self.log("accuracy", self.accuracy)


def _with_tp(kind: type[Measured]) -> type[Measured]:
    name = f"{kind.__name__}Tp"
    return type(name, (kind,), {"strategy": TP, "__module__": __name__, "__qualname__": name})


InStepsTp, InHooksTp, InCallbacksTp, NumpyTp = map(_with_tp, (InSteps, InHooks, InCallbacks, Numpy))
DEFAULT = [(InHooksTp, "tp"), (Wrapped, "2")]
CASES = [*DEFAULT, *((kind, "2") for kind in (InSteps, AsObjects, InHooks, InCallbacks, Numpy))]
CASES += [(kind, "2xtp") for kind in (InStepsTp, InHooksTp, InCallbacksTp, NumpyTp)] + [(InSteps, "2x2")]


@pytest.mark.parametrize(("kind", "mesh"), tiered(CASES, lambda case: case in DEFAULT))
def test_metrics_are_those_of_one_device(kind: type[Measured], mesh: str, worlds: Worlds) -> None:
    expected = train(kind, None)
    size = {"2": 2, "tp": 2}.get(mesh, 4)
    outcomes = worlds(size).run(train, kind, MESHES[mesh], size)
    assert expected.metrics
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra)


class RankNumbers(Measured):
    """Numbers that are other ones on every rank, and those that are not."""

    def setup(self, stage):
        self.number, self.alike = 1.0 + self.trainer.global_rank, 2.0

    def validation_step(self, batch, batch_idx):
        self.number += 1  # fed to the captured step
        self.log_dict({"mean": self.number, "alike_mean": self.alike}, sync_dist=True)
        self.log_dict({"sum": self.number, "alike_sum": self.alike}, sync_dist=True, reduce_fx="sum")
        self.log("max", self.number, sync_dist=True, reduce_fx=torch.max)
        self.log("min", self.number, sync_dist=True, reduce_fx="min", on_step=True)
        self.log("val", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self):
        self.log("hook_mean", self.number, sync_dist=True)
        self.log("hook_max", self.number, sync_dist=True, reduce_fx="max")


class RankTensors(RankNumbers):
    """Made of a rank's number: the step then runs its own Python."""

    def setup(self, stage):
        self.number = float(self.trainer.global_rank)

    def validation_step(self, batch, batch_idx):
        self.log("made", torch.tensor(self.number), sync_dist=True)

    def on_train_epoch_end(self):
        pass


class RankNumbersTp(RankNumbers):
    strategy: ClassVar = TP


NUMBERS = [(RankNumbers, "2"), (RankNumbersTp, "tp"), (RankNumbersTp, "2xtp")]


@pytest.mark.parametrize(("kind", "mesh"), tiered(NUMBERS, lambda case: case[1] == "2"))
def test_numbers_of_ranks_are_reduced_as_ddp_reduces_them(kind: type[Measured], mesh: str, worlds: Worlds) -> None:
    size = {"2": 2, "tp": 2}.get(mesh, 4)
    shards = MESHES[mesh].get("dp_shard", 1)
    mean, steps = 1 + (size - 1) / 2, 4 * 2
    expected = {
        "mean": mean + steps - 1.5,  # of the last epoch's four
        "sum": shards * sum(mean + step for step in range(5, 9)),
        "max": size + steps,
        "min_epoch": 1 + steps - 3,
        "alike_mean": 2.0,
        "alike_sum": 8.0,  # of one device
        "hook_mean": mean + steps,
        "hook_max": size + steps,
    }
    for outcome in worlds(size).run(train, kind, MESHES[mesh], size):
        seen = {name: outcome.metrics[name] for name in expected}
        torch.testing.assert_close(seen, {name: float(value) for name, value in expected.items()})


@pytest.mark.matrix
def test_tensors_of_ranks_are_reduced_as_ddp_reduces_them(worlds: Worlds) -> None:
    for outcome in worlds(2).run(train, RankTensors, MESHES["2"]):
        assert outcome.metrics["made"] == 0.5
