"""Evaluations of rows that ranks cannot share out evenly: what one device logs, counts and predicts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_autoparallel.errors import ConfigError
from tests.conformance.saved import MESHES, RULES
from tests.distributed.jobs import make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Rows(Dataset):
    """`count` rows with a name each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self.x[row], "y": self.y[row], "name": f"row {row}"}


class Evaluated(LightningModule):
    """Logs in every way, counts in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        self.called, self.updated = (torchmetrics.Accuracy("multiclass", num_classes=3) for _ in range(2))
        self.mean_loss = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection(
            [torchmetrics.Recall("multiclass", num_classes=3), torchmetrics.AUROC("multiclass", num_classes=3)]
        )

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        loss, right = F.cross_entropy(logits, batch["y"]), (logits.argmax(1) == batch["y"]).float()
        options = {"sync_dist": True, "on_epoch": True}
        self.log("loss", loss, **options)
        self.log("explicit", loss, batch_size=len(logits), **options)
        self.log_dict({"right": right.sum(), "rows": float(len(logits))}, reduce_fx="sum", **options)
        self.log("most", logits.max(), reduce_fx="max", **options)
        self.log("called", self.called(logits, batch["y"]))
        self.updated.update(logits, batch["y"])
        self.log("updated", self.updated)
        self.several.update(logits.softmax(1), batch["y"])
        self.mean_loss.update(loss, len(logits))

    def on_validation_epoch_end(self):
        self.log_dict(self.several.compute())
        self.log("mean_loss", self.mean_loss.compute())
        self.several.reset()
        self.mean_loss.reset()

    def predict_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        return {"logits": logits, "most": logits.argmax(1), "name": batch["name"], "pair": (logits[:, 0], logits.T)}


class Told(Evaluated):
    """What is right where its Python runs at every step, on the rank's rows."""

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss, sync_dist=True)
        self.log("explicit", loss, batch_size=len(logits), sync_dist=True)
        self.log("rows", float(len(logits)), reduce_fx="sum", sync_dist=True)
        self.called(logits, batch["y"])
        self.log("called", self.called)
        self.several.update(logits.softmax(1), batch["y"])

    def on_validation_epoch_end(self):
        self.log_dict(self.several.compute())
        self.several.reset()

    def predict_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        return {"logits": logits, "most": logits.argmax(1), "name": batch["name"], "pair": (logits[:, 0], logits)}


class Written(BasePredictionWriter):
    """The indices that predictions are said to be of."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[int] = []
        self.by_epoch: list[int] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.by_batch += batch_indices

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.by_epoch += [row for loader in batch_indices for batch in loader for row in batch]


def evaluate(kind: str, mesh: str | None, rows: int, capture: str = "auto") -> dict[str, Any]:
    torch.manual_seed(0)
    module = {"whole": Evaluated, "told": Told}[kind]()
    plan = {"base": "fsdp", "rules": RULES} if mesh == "2xtp" else "fsdp"
    strategy = make_strategy(MESHES[mesh], {"capture": capture, "plan": plan}) if mesh else None
    options = {"use_distributed_sampler": True}
    written = Written()
    ranks = dist.get_world_size() if mesh else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, ranks, callbacks=[written], **options)
        size = 4 // (2 if strategy is not None else 1)
        trainer.validate(module, DataLoader(Rows(rows), batch_size=size), verbose=False)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if kind == "whole" and strategy is not None:
            assert strategy.modes == {"validation_step": "step"}
        # Lightning's own sampler wants a row for each rank
        parts = trainer.predict(module, DataLoader(Rows(rows), batch_size=size)) if rows > 1 else []
        by_name = {
            name: (logits, int(most), float(first), column)
            for part in parts
            for name, logits, most, first, column in zip(
                part["name"], part["logits"], part["most"], part["pair"][0], _rows_first(kind, part), strict=True
            )
        }
    return {
        "logged": logged,
        "by_name": by_name,
        "indices": sorted(written.by_batch),
        "epoch": sorted(written.by_epoch),
    }


def _rows_first(kind: str, part: Mapping[str, Any]) -> torch.Tensor:
    return part["pair"][1].T if kind == "whole" else part["pair"][1]


CASES = [("whole", mesh, rows) for mesh in ("2", "2xtp") for rows in (1, 2, 3, 8, 9, 11)] + [
    ("told", "2", rows) for rows in (1, 3, 9, 11)
]


@pytest.mark.parametrize(("kind", "mesh", "rows"), tiered(CASES, lambda case: case[1] == "2" and case[2] == 11))
def test_evaluations_are_those_of_one_device(kind: str, mesh: str, rows: int, worlds: Worlds) -> None:
    expected = evaluate(kind, None, rows)
    everyone = worlds({"2": 2, "2xtp": 4}[mesh]).run(
        evaluate, kind, mesh, rows, "forward" if kind == "told" else "auto"
    )
    for seen in everyone:
        torch.testing.assert_close(seen["logged"], expected["logged"], rtol=1e-5, atol=1e-6)
        assert seen["indices"] == seen["epoch"] == sorted(int(name.removeprefix("row ")) for name in seen["by_name"])
    first_of_tp = everyone[:: len(everyone) // 2]
    assert sum(len(seen["by_name"]) for seen in first_of_tp) == (rows if rows > 1 else 0)
    together = {name: value for seen in first_of_tp for name, value in seen["by_name"].items()}
    torch.testing.assert_close(dict(sorted(together.items())), dict(sorted(expected["by_name"].items())))


class Largest(torchmetrics.Metric):
    """Of each update, joined by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("entries", default=[], dist_reduce_fx=lambda entries: torch.stack(entries).sort().values)

    def update(self, logits: torch.Tensor) -> None:
        self.entries.append(logits.max())

    def compute(self) -> torch.Tensor:
        entries = self.entries if isinstance(self.entries, torch.Tensor) else torch.stack(self.entries)
        return entries.max()


class Ranked(Evaluated):
    """Metrics that torchmetrics joins entry by entry, one for each update."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.ndcg = torchmetrics.RetrievalMAP(), torchmetrics.RetrievalNormalizedDCG()
        self.largest = Largest()

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch["x"])[:, 0]
        for metric in (self.map, self.ndcg):
            metric.update(scores, batch["y"] > 0, indexes=(batch["x"][:, 1] > 0).long())
        self.log("map", self.map)
        self.largest.update(scores)

    def on_validation_epoch_end(self):
        self.log("ndcg", self.ndcg.compute())
        self.log("largest", self.largest.compute())


def ranked(mesh: str | None, rows: int, capture: str = "auto") -> dict[str, float]:
    torch.manual_seed(0)
    strategy = make_strategy(MESHES[mesh], {"capture": capture}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1, use_distributed_sampler=True)
    trainer.validate(Ranked(), DataLoader(Rows(rows), batch_size=2 if mesh == "2" else 4), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("mesh", "rows", "capture"),
    [("2", 9, "auto"), ("2", 9, "forward"), ("2", 11, "auto"), ("2", 11, "forward"), ("tp", 9, "auto")],
)
def test_lists_that_are_longer_on_one_rank_are_joined(mesh: str, rows: int, capture: str, worlds: Worlds) -> None:
    expected = ranked(None, rows)
    for seen in worlds(2).run(ranked, mesh, rows, capture):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


class SharedByLoaders(Evaluated):
    """The same metrics count two loaders; something is logged before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.area = torchmetrics.AUROC("multiclass", num_classes=3)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.log("seen", 1.0)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.net(batch["x"])
        self.log("loss", F.cross_entropy(logits, batch["y"]), sync_dist=True)
        self.called.update(logits, batch["y"])
        self.area.update(logits.softmax(1), batch["y"])
        self.mean_loss.update(F.cross_entropy(logits, batch["y"]), len(logits))

    def on_validation_epoch_end(self):
        for name, metric in {"called": self.called, "area": self.area, "mean_loss": self.mean_loss}.items():
            self.log(name, metric.compute())
            metric.reset()


def shared_by_loaders(mesh: str | None, counts: list[int], capture: str = "auto") -> list[dict[str, float]]:
    """What is logged of two evaluations by one module."""
    torch.manual_seed(0)
    strategy = make_strategy(MESHES[mesh], {"capture": capture}) if mesh else None
    trainer, module = make_trainer(strategy, 2 if mesh else 1, use_distributed_sampler=True), SharedByLoaders()
    logged = []
    for _ in range(2):
        loaders = [DataLoader(Rows(rows), batch_size=2 if mesh else 4) for rows in counts]
        trainer.validate(module, loaders, verbose=False)
        logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return logged


@pytest.mark.parametrize("capture", ["auto", "forward"])
@pytest.mark.parametrize("counts", [[9, 1], [1, 9]], ids=str)
def test_metrics_count_loaders_with_and_without_rows_for_each_rank(
    counts: list[int], capture: str, worlds: Worlds
) -> None:
    expected = shared_by_loaders(None, counts)
    for seen in worlds(2).run(shared_by_loaders, "2", counts, capture):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


class AtOnce(Evaluated):
    """Counts the rows of two loaders that come together."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def validation_step(self, batch, batch_idx):
        self.rows += len(batch["a"]["x"])

    def on_validation_epoch_end(self):
        """No metric was updated."""


def rows_at_once(mesh: Mapping[str, int]) -> int:
    module, loaders = AtOnce(), {name: DataLoader(Rows(rows), batch_size=2) for name, rows in (("a", 9), ("b", 12))}
    trainer = make_trainer(make_strategy(mesh, {"capture": "forward"}), 2, use_distributed_sampler=True)
    trainer.validate(module, CombinedLoader(loaders, "max_size_cycle"), verbose=False)
    return module.rows


def test_of_loaders_that_come_together_each_rank_has_its_own_rows(worlds: Worlds) -> None:
    assert worlds(2).run(rows_at_once, MESHES["2"]) == [5, 5]


def counted_in_runs(mesh: Mapping[str, int]) -> list[Any]:
    module = Evaluated()
    before = [(metric.sync_on_compute, metric._to_sync) for metric in module.modules() if _is_metric(metric)]
    trainer = make_trainer(make_strategy(mesh, {}), 2, use_distributed_sampler=True)
    trainer.validate(module, DataLoader(Rows(8), batch_size=2), verbose=False)
    after = [(metric.sync_on_compute, metric._to_sync) for metric in module.modules() if _is_metric(metric)]
    return [before, after]


def _is_metric(module: nn.Module) -> bool:
    return isinstance(module, torchmetrics.Metric)


def test_metrics_are_joined_afterwards_as_the_user_has_it(worlds: Worlds) -> None:
    for before, after in worlds(2).run(counted_in_runs, MESHES["2"]):
        assert before == after


def uneven_loaders(mesh: Mapping[str, int]) -> str:
    trainer = make_trainer(make_strategy(mesh, {}), 2)
    try:
        trainer.validate(Evaluated(), DataLoader(Rows(4 + dist.get_rank()), batch_size=1), verbose=False)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_numbers_of_batches_are_told_before_the_first(worlds: Worlds) -> None:
    for said in worlds(2).run(uneven_loaders, MESHES["2"]):
        assert "rank 0 [4], rank 1 [5]" in said
        assert "use_distributed_sampler=True" in said
