"""The last rows of an evaluation in hooks: metrics that these update count each row once, and what a module collects by
itself holds no more rows than under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.distributed.jobs import make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Rows(Dataset):
    """`count` rows, each with its place."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.x[row], row


class Scored(LightningModule):
    """Scores rows in validation and test alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])[:, 0]
        self.log("mean", scores.mean(), on_epoch=True, sync_dist=True)
        return {"scores": scores}

    test_step = validation_step


class InHook(Scored):
    """The module's metrics, in its hook."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.of_scores = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.by_kind = [torchmetrics.CatMetric()]

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.rows.update(torch.ones(len(outputs["scores"])))
        self.of_scores.update(outputs["scores"])
        self.by_kind[0].update(batch[1])
        self.log_dict({"rows": self.rows, "of_scores": self.of_scores})
        self.log("most", outputs["scores"].max(), reduce_fx="max", on_epoch=True, on_step=False, sync_dist=True)
        self.log("summed", outputs["scores"].sum(), reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self):
        self.log("places", self.by_kind[0].compute().float().square().sum())

    on_test_epoch_end = on_validation_epoch_end


class ReadsValues(InHook):
    """Is not captured whole."""

    def validation_step(self, batch, batch_idx):
        assert batch[1].max().item() >= 0
        return super().validation_step(batch, batch_idx)

    test_step = validation_step


class Counts(Callback):
    """Metrics of a callback's own."""

    def on_validation_epoch_start(self, trainer, pl_module):
        self.rows = torchmetrics.SumMetric()
        self.others = {"places": torchmetrics.MetricCollection([torchmetrics.SumMetric()])}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.rows.update(torch.ones(len(outputs["scores"])))
        self.others["places"].update(batch[1])

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log_dict({"rows": self.rows.compute(), **self.others["places"].compute()})

    on_test_epoch_end = on_validation_epoch_end


class InCallback(Scored):
    """Brings a callback with it."""

    def configure_callbacks(self):
        return [Counts()]


KINDS = {each.__name__: each for each in (InHook, ReadsValues, InCallback)}


def evaluated(kind: str, ranks: int, count: int, size: int, run: str) -> dict[str, float]:
    torch.manual_seed(0)
    strategy = make_strategy({"dp_shard": ranks}, {"plan": "fsdp"}) if ranks > 1 else None
    trainer = make_trainer(strategy, ranks, use_distributed_sampler=True)
    getattr(trainer, run)(KINDS[kind](), DataLoader(Rows(count), batch_size=size), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


CASES = [
    (kind, count, run) for kind in KINDS for count in (1, 3, 11, 15) for run in ("validate", "test")
]  # of 15 rows as many as seven are left for every rank
QUICK = {("InHook", 15, "validate"), ("ReadsValues", 15, "test"), ("InCallback", 15, "validate")}


@pytest.mark.parametrize(("kind", "count", "run"), tiered(CASES, lambda case: case in QUICK))
def test_metrics_of_hooks_count_each_row_once(kind: str, count: int, run: str, worlds: Worlds) -> None:
    expected = evaluated(kind, 1, count, 8, run)
    assert expected["rows"] == count
    for seen in worlds(2).run(evaluated, kind, 2, count, 4, run):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


class Collects(Scored):
    """What many write: a list of all scores, gathered at the end."""

    def on_validation_epoch_start(self):
        self.places: list[Tensor] = []

    def validation_step(self, batch, batch_idx):
        self._keep(batch[1])
        return super().validation_step(batch, batch_idx)

    def _keep(self, places: Tensor) -> None:
        self.places.append(places)

    def on_validation_epoch_end(self):
        self.places = self.all_gather(torch.cat(self.places)).flatten().tolist()


class CollectsInHook(Collects):
    """In the hook behind the step, in an entry."""

    def on_validation_epoch_start(self):
        self.places = {}

    def _keep(self, places: Tensor) -> None:
        """No step keeps anything."""

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.places[batch_idx] = batch[1]

    def on_validation_epoch_end(self):
        self.places = self.all_gather(torch.cat(list(self.places.values()))).flatten().tolist()


COLLECTING = {each.__name__: each for each in (Collects, CollectsInHook)}


def collected(kind: str, by: str, count: int, size: int) -> tuple[list[int], float]:
    torch.manual_seed(0)
    ranks = 1 if by == "one device" else dist.get_world_size()
    strategies: dict[str, Any] = {
        "one device": lambda: None,
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "ours": lambda: make_strategy({"dp_shard": ranks}, {"plan": "fsdp"}),
    }
    trainer = make_trainer(strategies[by](), ranks, use_distributed_sampler=True)
    module = COLLECTING[kind]()
    trainer.validate(module, DataLoader(Rows(count), batch_size=size), verbose=False)
    return sorted(map(int, module.places)), float(trainer.callback_metrics["mean"])


COLLECTED = [(kind, ranks, count) for kind in COLLECTING for ranks in (2, 4) for count in (11, 13, 15)]


@pytest.mark.parametrize(("kind", "ranks", "count"), tiered(COLLECTED, lambda case: case[1:] == (2, 15)))
def test_no_more_rows_are_collected_than_under_ddp(kind: str, ranks: int, count: int, worlds: Worlds) -> None:
    (theirs, _), *_ = worlds(ranks).run(collected, kind, "ddp", count, 8 // ranks)
    _, mean = collected(kind, "one device", count, 8)
    for places, logged in worlds(ranks).run(collected, kind, "ours", count, 8 // ranks):
        assert set(places) == set(range(count)) and len(places) == len(theirs)
        if len(theirs) - count in (0, ranks - 1):  # one row is left, which every rank evaluates
            assert logged == pytest.approx(mean, abs=1e-6)


class Keeps(Callback):
    """Collects what its rank evaluates."""

    def __init__(self) -> None:
        self.places: list[Tensor] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.places.append(batch[1])


def rows_of_first_rank(count: int) -> int:
    """How many rows a callback keeps that rank 0 alone has."""
    keeps = [Keeps()] if dist.get_rank() == 0 else []
    strategy = make_strategy({"dp_shard": 2}, {"plan": "fsdp"})
    trainer = make_trainer(strategy, 2, use_distributed_sampler=True, callbacks=keeps)
    trainer.validate(Scored(), DataLoader(Rows(count), batch_size=4), verbose=False)
    return sum(len(places) for keep in keeps for places in keep.places)


def test_a_callback_of_one_rank_collects_as_under_ddp(worlds: Worlds) -> None:
    assert worlds(2).run(rows_of_first_rank, 15) == [8, 0]
