"""Batches of any nesting and from any loader reach the step as on one device."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.distributed.jobs import MESH, Net, Outcome, assert_equals_one_device, train
from tests.support.worlds import Worlds


class Mapped(Net):
    def batches(self):
        return [{"x": x, "y": y, "scale": torch.tensor(0.5), "names": ["a", "b"]} for x, y in super().batches()]

    def loss(self, batch):
        return super().loss((batch["x"], batch["y"])) * batch["scale"] * len(batch["names"])


class Nested(Net):
    def batches(self):
        return [[{"in": (x,)}, {"out": [y, 3]}] for x, y in super().batches()]

    def loss(self, batch):
        inputs, outputs = batch
        return super().loss((inputs["in"][0], outputs["out"][0])) / outputs["out"][1]


@dataclasses.dataclass
class Sample:
    """A batch with names."""

    x: Tensor
    y: Tensor
    split: str = "train"


class Dataclass(Net):
    def batches(self):
        return [Sample(x, y) for x, y in super().batches()]

    def loss(self, batch):
        assert batch.split == "train"
        return super().loss((batch.x, batch.y))


class Single(Net):
    def batches(self):
        return [x for x, _ in super().batches()]

    def loss(self, batch):
        return self.net(batch).pow(2).mean()


@pytest.mark.parametrize("kind", [Mapped, Nested, Dataclass, Single])
def test_nestings(kind, worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, MESH), train(kind, None))


class Seen(Net):
    """Keeps the rows that training saw and the random state that it began with."""

    epochs = 2
    trainer_options: ClassVar = {"use_distributed_sampler": True}

    def __init__(self) -> None:
        super().__init__()
        self.rows_seen: list[list[int]] = []
        self.state: Any = None

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(22, 6, generator=generator)
        x[:, 0] = torch.arange(22)
        return TensorDataset(x, torch.randint(0, 3, (22,), generator=generator))

    def loader(self, rank, shards):
        return DataLoader(self.dataset(), batch_size=4)

    def loss(self, batch):
        return super().loss((batch[0] / 22, batch[1]))

    def on_train_start(self):
        self.state = torch.get_rng_state(), torch.rand(3)

    def on_train_batch_start(self, batch, batch_idx):
        self.rows_seen.append(batch[0][:, 0].int().tolist())

    def extra(self):
        return self.rows_seen, self.state


def _joined(lists: Any) -> list[int]:
    return [item for items in lists for item in items]


class SameRowsOnOneDevice(Seen):
    """The global batches that the ranks of a training saw together, epoch by epoch."""

    trainer_options: ClassVar = {"reload_dataloaders_every_n_epochs": 1}
    ranks: ClassVar[list[list[list[int]]]] = []  # rank, batch, row

    def loader(self, rank, shards):
        x, y = self.dataset().tensors
        count = len(self.ranks[0]) // self.epochs
        batches = list(zip(*self.ranks, strict=True))[self.current_epoch * count :][:count]
        return DataLoader([(x[_joined(rows)], y[_joined(rows)]) for rows in batches], batch_size=None)


def _epochs(outcome: Outcome) -> list[list[int]]:
    half = len(outcome.extra[0]) // 2
    return [_joined(outcome.extra[0][:half]), _joined(outcome.extra[0][half:])]


def test_the_distributed_sampler_shares_rows_out(worlds: Worlds) -> None:
    first, second = outcomes = worlds(2).run(train, Seen, MESH)
    for outcome in outcomes:
        assert [len(batch) for batch in outcome.extra[0]] == [4, 4, 3] * 2  # the last batch is smaller
    for rows, other_rows in zip(_epochs(first), _epochs(second), strict=True):
        assert sorted(rows + other_rows) == list(range(22))
    SameRowsOnOneDevice.ranks = [outcome.extra[0] for outcome in outcomes]
    assert_equals_one_device(outcomes, train(SameRowsOnOneDevice, None))
    assert first.said("captured again") == 1


def test_replicas_of_the_batch_axes_get_different_rows(worlds: Worlds) -> None:
    outcomes = worlds(4).run(train, Seen, {"dp_replicate": 2, "dp_shard": 2}, 4)
    for rows in zip(*map(_epochs, outcomes), strict=True):
        assert set(_joined(rows)) == set(range(22))
        assert len(_joined(rows)) == 24  # the sampler repeats two rows to fill the last batch


class Shuffled(Seen):
    """Every rank reads all rows in an order drawn from torch's generator; the batch is replicated by what is read."""

    def loader(self, rank, shards):
        generator = torch.Generator().manual_seed(7)
        return DataLoader(self.dataset(), batch_size=4, shuffle=True, generator=generator, drop_last=True)

    trainer_options: ClassVar = {}


def test_the_sample_batch_is_not_consumed(worlds: Worlds) -> None:
    expected = train(Shuffled, None)
    for outcome in worlds(2).run(train, Shuffled, MESH):
        assert outcome.extra[0] == expected.extra[0]
        torch.testing.assert_close(outcome.extra[1], expected.extra[1], rtol=0, atol=0)


class _OneWay(IterableDataset):
    """Its own iterator: what is read is gone."""

    def __init__(self, batches: list[Any]) -> None:
        self.remaining = list(batches)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.remaining:
            raise StopIteration
        return self.remaining.pop(0)


class OneWay(Net):
    def loader(self, rank, shards):
        return DataLoader(_OneWay(list(super().loader(rank, shards))), batch_size=None)


class Generated(Net):
    """A plain generator in the place of a loader."""

    def loader(self, rank, shards):
        return (batch for batch in list(super().loader(rank, shards)))


@pytest.mark.parametrize("kind", [OneWay, Generated])
def test_an_iterator_loses_no_batch(kind, worlds: Worlds) -> None:
    outcomes, expected = worlds(2).run(train, kind, MESH), train(Net, None)
    assert len(expected.losses) == Net.steps
    assert_equals_one_device(outcomes, expected)
