"""Ranks whose batches do not fit together stop together, where the whole step is to be captured."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds

SECONDS = 120


class _Uneven(Net):
    """Rank 1 has other rows at one step."""

    at = 0
    strategy: ClassVar = {"capture": "step"}

    def loader(self, rank, shards):
        own = list(super().loader(rank, shards))
        if rank == 1:
            own[self.at] = tuple(leaf[:-1] for leaf in own[self.at])
        return DataLoader(own, batch_size=None)


class UnevenFirst(_Uneven):
    at = 0


class UnevenThird(_Uneven):
    at = 2


@pytest.mark.parametrize("kind", [pytest.param(UnevenFirst, marks=pytest.mark.matrix), UnevenThird])
def test_ranks_with_different_numbers_of_rows(kind, worlds: Worlds) -> None:
    for text, seconds in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert text.startswith(
            "RanksDifferError: ranks hold different batches: rank 0 has training_step on 0: float32[4, 6]"
        )
        assert "rank 1 has training_step on 0: float32[3, 6], 1: int64[3]" in text
        assert "give every rank the same number of rows (drop_last=True)" in text
        assert seconds < SECONDS


class UnevenLengths(Net):
    """Rank 1 pads to another length."""

    strategy: ClassVar = {"capture": "step"}

    def loader(self, rank, shards):
        own = [(x.repeat(1, 1 + rank), y) for x, y in super().loader(rank, shards)]
        return DataLoader(own, batch_size=None)


def test_ranks_with_different_lengths(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, UnevenLengths, timeout_s=SECONDS):
        assert "dim 1 of leaf '0' is 6 and 12 long: pad to one length on all ranks (padding='max_length'" in text


class Weighted(Net):
    """A leaf of another length than the batch, a weight per feature."""

    differ = False

    def batches(self):
        return [{"x": x, "y": y, "weight": torch.linspace(0.5, 2, 6) + i} for i, (x, y) in enumerate(super().batches())]

    def loss(self, batch):
        return super().loss((batch["x"] * batch["weight"], batch["y"]))

    def loader(self, rank, shards):
        generator_batches = [
            {
                "x": batch["x"].chunk(shards)[rank],
                "y": batch["y"].chunk(shards)[rank],
                "weight": batch["weight"] + (rank if self.differ else 0),
            }
            for batch in self.batches()
        ]
        return DataLoader(generator_batches, batch_size=None)


class WeightedDifferently(Weighted):
    differ = True
    strategy: ClassVar = {"capture": "step"}


def test_a_leaf_of_another_length_is_replicated(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, Weighted, {"dp_shard": 2}), train(Weighted, None))


def test_a_replicated_leaf_with_different_values(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, WeightedDifferently, timeout_s=SECONDS):
        assert text.startswith(
            "RanksDifferError: batch leaf 'weight' has other values on rank 1 than on rank 0, but its dim 0"
        )
        assert "give all ranks the same values, or set batch_dims={'weight': 0}" in text


class WeightAsLongAsTheBatch(Weighted):
    """Four rows per rank and four weights, which only `batch_dims` can tell apart."""

    strategy: ClassVar = {"batch_dims": {"weight": None}}

    def batches(self):
        return [{**batch, "weight": batch["weight"][:4]} for batch in super().batches()]

    def loss(self, batch):
        weight = torch.cat([batch["weight"], batch["weight"][:2]])
        return super().loss({**batch, "weight": weight})


class UnknownLeaf(Net):
    strategy: ClassVar = {"batch_dims": {"weigth": None}}


class OtherDim(Net):
    strategy: ClassVar = {"batch_dims": {"0": 1}}


def test_batch_dims_says_what_is_replicated(worlds: Worlds) -> None:
    assert_equals_one_device(
        worlds(2).run(train, WeightAsLongAsTheBatch, {"dp_shard": 2}), train(WeightAsLongAsTheBatch, None)
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (UnknownLeaf, "batch_dims['weigth'] matches no leaf of the batch; leaves are 0, 1"),
        (OtherDim, "batch_dims['0']=1: only dim 0 can be the batch; move it there in the dataset"),
    ],
)
def test_batch_dims_that_cannot_be(kind, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert text == f"ConfigError: {message}"


class EverLonger(Net):
    """Every batch has one row more than the last."""

    steps = 8
    strategy: ClassVar = {"capture": "step", "max_captures": 3}

    def batches(self):
        full = super().batches()
        return [(x[: 2 * i + 2].repeat(2, 1), y[: 2 * i + 2].repeat(2)) for i, (x, y) in enumerate(full[:4])]


def test_batches_of_ever_changing_shape(worlds: Worlds) -> None:
    expected = train(EverLonger, None)
    outcomes = worlds(2).run(train, EverLonger, MESH)
    assert_equals_one_device(outcomes, expected)
    said = outcomes[0].said
    assert said("training_step met more than max_captures=3 kinds of batches, the last 0: float32[8") == 1
    assert said("pad them to a few shapes (pad_to_multiple_of for lengths") == 1
    assert said("What was captured of training_step so far is let go") == 1


class SmallerLast(Net):
    """The last batch has fewer rows, on every rank alike."""

    epochs = 2

    def batches(self):
        *others, (x, y) = super().batches()
        return [*others, (x[:4], y[:4])]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss


def test_a_smaller_last_batch_is_captured_once_more(worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, SmallerLast, {"dp_shard": 2})
    assert_equals_one_device(outcomes, train(SmallerLast, None))
    assert outcomes[0].said("training_step is captured again for a batch of another kind") == 1
    assert not dist.is_initialized()
