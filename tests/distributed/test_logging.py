"""What a step logs is what one device logs, on every rank."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torchmetrics
from torch import nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Logs(Net):
    """Every way of `self.log`."""

    epochs = 2

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("step", loss * 2, on_step=True, on_epoch=False)
        self.log("epoch", loss.detach() * 3, on_step=False, on_epoch=True, sync_dist=True)
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", x.amax(), on_step=True, on_epoch=True, reduce_fx=torch.max, sync_dist=True)
        self.log("min", x.amin(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("weighted", y.float().mean(), on_step=False, on_epoch=True, batch_size=len(y))
        self.log("python", 2.5, on_epoch=True)
        self.log("index", batch_idx, on_epoch=True)
        self.log_dict({"first": loss, "second": x.mean(), "third": 3}, on_step=True, on_epoch=True)
        return {"loss": loss, "extra": x.mean()}


class LogsThroughMetrics(Net):
    """torchmetrics: forward, update, collections; of rows and of values that are global already."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.updated = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.collection = torchmetrics.MetricCollection(
            {
                "recall": torchmetrics.Recall("multiclass", num_classes=3),
                "f1": torchmetrics.F1Score("multiclass", num_classes=3),
            }
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log("forward_value", self.accuracy(scores, y), on_step=True, on_epoch=False)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.updated.update(scores.argmax(1), y)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log_dict(self.collection(scores, y), on_step=True, on_epoch=False)
        return loss


class LogsCollection(LogsThroughMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.collection.update(scores, y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, y)


class MetricsOfGlobalValues(Net):
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.sum = torchmetrics.SumMetric()
        self.max = torchmetrics.MaxMetric()
        self.weighted = torchmetrics.MeanMetric()
        self.per_row = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.update(loss)
        self.sum.update(loss)
        self.max.update(loss)
        self.weighted.update(loss, weight=len(batch[0]))
        self.per_row.update(batch[0][:, 0])
        self.log("computed", self.sum.compute(), on_epoch=True)
        for name in ("mean", "sum", "max", "weighted", "per_row"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss


class ForwardOfGlobalValues(Net):
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.sum = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("now", self.sum(loss), on_step=True, on_epoch=False)
        self.log("total", self.sum, on_step=False, on_epoch=True)
        return loss


class LogsMetricItself(Net):
    """on_step and on_epoch of one metric object, which the logger computes and resets."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(scores, y)


class MixesRowsAndGlobalValues(Net):
    strategy: ClassVar = {"capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.update(batch[0].mean(1))
        self.mean.update(loss)
        return loss


class MixesAndCounts(MixesRowsAndGlobalValues):
    """Not refused, as nothing asks for whole steps: it climbs down, and counts each step once."""

    strategy: ClassVar = {}

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def extra(self) -> int:
        return self.seen


class LeavesWholeSteps(Net):
    """The second half of its steps is one capture too many: their Python runs on each rank's rows."""

    strategy: ClassVar = {"max_captures": 1}

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total, self.kept = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        factor = 1.0 if batch_idx < self.steps // 2 else 2.0
        scores = self.net(x)
        loss = factor * nn.functional.cross_entropy(scores, y)
        self.mean.update(loss)
        self.total.update(x.sum())
        self.kept.update(x.sum())
        self.accuracy.update(scores.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 3), y.repeat_interleave(2))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("average", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", x.amax(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("kept", self.kept.compute().sum())


class ComputesWithTheValue(Net):
    strategy: ClassVar = {"capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.mean(batch[0])


KINDS = [Logs, LogsThroughMetrics, LogsCollection, MetricsOfGlobalValues, ForwardOfGlobalValues, LogsMetricItself]


@pytest.mark.parametrize("kind", KINDS)
def test_logged_values_are_those_of_one_device(kind, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, kind, MESH)
    expected = train(kind, None)
    assert expected.logged and expected.metrics
    assert_equals_one_device(outcomes, expected)


def test_a_step_whose_metrics_do_not_go_together_runs_once(worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, MixesAndCounts, MESH)
    assert outcomes[0].said("training_step runs in forward mode") == 1
    assert [outcome.extra for outcome in outcomes] == [MixesAndCounts.steps] * 2


@pytest.mark.parametrize(("mesh", "ranks"), [(MESH, 2), ({"dp_shard": 2, "tp": 2}, 4)])
def test_what_was_counted_of_whole_batches_counts_once_beside_rows(mesh, ranks, worlds: Worlds) -> None:
    """Where a step leaves whole batches within an epoch, its sums, means and metrics are those of all rows still."""
    expected = train(LeavesWholeSteps, None).metrics
    outcomes = worlds(ranks).run(train, LeavesWholeSteps, mesh, ranks)
    assert len(expected) == 7
    assert outcomes[0].said("training_step runs in forward mode") == 1
    for outcome in outcomes:
        assert outcome.metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [Logs, MetricsOfGlobalValues])
def test_replicated_groups_count_once(kind, worlds: Worlds) -> None:
    outcomes = worlds(4).run(train, kind, {"dp_replicate": 2, "dp_shard": 2}, 4)
    assert_equals_one_device(outcomes, train(kind, None))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            MixesRowsAndGlobalValues,
            "updates a MeanMetric with rows of the batch at one time and with values of the whole",
        ),
        (
            ComputesWithTheValue,
            "computes with the value of a torchmetrics metric: it is known at real steps only; log it",
        ),
    ],
)
def test_metrics_that_cannot_be_right_are_refused(kind, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind):
        assert text.startswith("CaptureError: test_logging.py:")
        assert message in text
