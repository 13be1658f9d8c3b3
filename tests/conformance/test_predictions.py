"""Predictions of rows that ranks cannot share out evenly: whatever a step returns, each row once, as on one device."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.distributed.jobs import make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance
MESH = {"dp_shard": 2}


class Rows(Dataset):
    """`count` rows, each with its place."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int, str]:
        return self.x[row], row, f"row {row}"


@dataclasses.dataclass
class Record:
    """What is returned in an object."""

    row: list[int]
    score: numpy.ndarray


def lists(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    return {"row": rows.tolist(), "score": scores.tolist()}


def arrays(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    return {"row": rows.tolist(), "score": scores.cpu().numpy(), "kind": "test"}


def record(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    return Record(rows.tolist(), scores.cpu().numpy())


def pair(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    """As long as a batch of two rows."""
    assert scores.sum().item() > -100
    return rows, scores


def numbers(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    return [(row, float(score)) for row, score in zip(rows.tolist(), scores, strict=True)]


def found(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    """As a detection: of each row a dict of tensors, which may be as long as the batch."""
    return [
        {"row": int(row), "score": score.item(), "boxes": torch.full((2 + int(row) % 2,), float(score))}
        for row, score in zip(rows, scores, strict=True)
    ]


def unbound(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    """Which can be captured whole, and is then of the rows of all ranks."""
    return [{"row": row, "score": score} for row, score in zip(rows, scores, strict=True)]


def renamed(scores: Tensor, rows: Tensor, names: list[str]) -> Any:
    return {"row": [int(name.removeprefix("row ")) for name in names], "score": scores}


KINDS = {each.__name__: each for each in (lists, arrays, record, pair, numbers, found, unbound, renamed)}


def one_by_one(kind: str, part: Any) -> list[tuple[int, tuple[float, ...]]]:
    """What a batch's prediction says of each row."""
    if kind in ("found", "unbound"):
        return [(int(one["row"]), (float(one["score"]), *map(float, one.get("boxes", ())))) for one in part]
    if kind == "numbers":
        return [(row, (score,)) for row, score in part]
    if kind == "record":
        part = vars(part)
    rows, scores = part if kind == "pair" else (part["row"], part["score"])
    return [(int(row), (float(score),)) for row, score in zip(rows, scores, strict=True)]


class Predicting(LightningModule):
    """Returns its scores in one of many ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(4, 1), kind

    def predict_step(self, batch, batch_idx):
        x, rows, names = batch
        return KINDS[self.kind](self.net(x)[:, 0], rows, names)


class Written(BasePredictionWriter):
    """Of each batch the indices beside the predictions, and those of all."""

    def __init__(self, kind: str) -> None:
        super().__init__("batch_and_epoch")
        self.kind = kind
        self.started: list[int] = []

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.started.append(batch_idx)

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert batch_idx == self.started[-1]
        assert [row for row, _ in one_by_one(self.kind, prediction)] == batch_indices

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        for prediction, indices in zip(predictions, batch_indices[0], strict=True):
            assert [row for row, _ in one_by_one(self.kind, prediction)] == indices


def predicted(kind: str, mesh: dict[str, int] | None, count: int, size: int) -> list[tuple[int, tuple[float, ...]]]:
    torch.manual_seed(0)
    strategy = make_strategy(mesh, {"plan": "fsdp"}) if mesh else None
    ranks = dist.get_world_size() if mesh else 1
    trainer = make_trainer(strategy, ranks, callbacks=[Written(kind)], use_distributed_sampler=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another rank's")
        parts = trainer.predict(Predicting(kind), DataLoader(Rows(count), batch_size=size))
    return [one for part in parts for one in one_by_one(kind, part)]


# 9 rows of 2 for each rank: of the last batch rank 1 has none
CASES = [(kind, count, size) for kind in KINDS for count, size in ((11, 2), (9, 2), (9, 4), (11, 1))]
QUICK = {("arrays", 11, 2), ("pair", 11, 2), ("found", 11, 2), ("found", 9, 2), ("unbound", 11, 2), ("numbers", 11, 1)}


@pytest.mark.parametrize(("kind", "count", "size"), tiered(CASES, lambda case: case in QUICK))
def test_each_row_is_predicted_once(kind: str, count: int, size: int, worlds: Worlds) -> None:
    expected = dict(predicted(kind, None, count, size))
    seen = worlds(2).run(predicted, kind, MESH, count, size)
    assert sorted(row for rank in seen for row, _ in rank) == list(range(count))
    for row, scores in (one for rank in seen for one in rank):
        assert scores == pytest.approx(expected[row], abs=1e-6)


class Averaging(Predicting):
    """Returns what cannot be said of the rank's own rows alone."""

    def predict_step(self, batch, batch_idx):
        return {"mean": self.net(batch[0]).mean().item(), "row": batch[1].tolist()}


class Collecting(Callback):
    """The indices that a callback is told of."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_predict_batch_end(self, trainer: Trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.rows += outputs["row"]


def told_of(mesh: dict[str, int], count: int) -> tuple[list[str], list[int]]:
    collecting = Collecting()
    trainer = make_trainer(make_strategy(mesh, {}), 2, callbacks=[collecting], use_distributed_sampler=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.predict(Averaging("lists"), DataLoader(Rows(count), batch_size=2))
    told = [str(each.message) for each in caught if "another rank's" in str(each.message)]
    return told, collecting.rows


def test_what_cannot_be_told_apart_is_said(worlds: Worlds) -> None:
    (_, mine), (told, theirs) = worlds(2).run(told_of, MESH, 11)
    assert len(told) == 1 and "predict_step returns a float for a batch of 2 rows" in told[0]
    assert sorted([*mine, *theirs]) == list(range(11))


def test_nothing_is_said_of_rows_that_can_be_shared_out(worlds: Worlds) -> None:
    assert [told for told, _ in worlds(2).run(told_of, MESH, 12)] == [[], []]
