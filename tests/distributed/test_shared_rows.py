"""Ranks that have parts of one batch shard train on its rows and draw alike, whatever each of them has done besides."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.jobs import assert_equals_one_device, train
from tests.distributed.test_tensor_parallel_lightning import MESH, Split
from tests.support.worlds import Worlds

TP = {"tp": 2}


def rank_of_process() -> int:
    """0 where there is one device."""
    return dist.get_rank() if dist.is_initialized() else 0


class Drawn(Split):
    """Generators that nobody has seeded stand elsewhere on each rank; numpy's makes noise, Python's mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(rank_of_process())
        np.random.seed(rank_of_process())

    def loader(self, rank: int, shards: int) -> DataLoader:
        return DataLoader(_Noisy(super().loader(rank, shards).dataset), batch_size=None)


class _Noisy:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        x, y = self.batches[number]
        noise = torch.from_numpy(np.random.rand(*x.shape)).float()
        return x + noise, y[random.sample(range(len(y)), len(y))]


class Preview(Split):
    """Rank 0 draws more, for something to show; then the step draws, from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_epoch_start(self):
        if rank_of_process() == 0:
            torch.randn(3), np.random.rand(3), random.random()

    def training_step(self, batch, batch_idx):
        x, y = batch
        made = torch.randn_like(x) * random.random() + torch.from_numpy(np.random.rand(*x.shape)).float()
        loss = F.cross_entropy(self.net(made), y)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Later(Split):
    """From the second batch on each rank has noise of its own in its rows, and looks at some by itself."""

    noisy_from = 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if rank_of_process() == 0:
            self.trainer.strategy.batch_to_device(batch)

    def loader(self, rank: int, shards: int) -> DataLoader:
        generator = torch.Generator().manual_seed(rank_of_process())
        batches: list[Any] = list(super().loader(rank, shards).dataset)
        for i in range(self.noisy_from, len(batches)):
            x, y = batches[i]
            batches[i] = (x + torch.randn(x.shape, generator=generator), y)
        return DataLoader(batches, batch_size=None)


class AtOnce(Later):
    """The same from the first batch on; the labels are those of all."""

    noisy_from = 0


class Arrays(Later):
    """The rows are arrays, beside a text that is each host's own."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """No look at what was an array."""

    def loader(self, rank: int, shards: int) -> DataLoader:
        batches = [(x.numpy(), y, f"of process {rank_of_process()}") for x, y in super().loader(rank, shards).dataset]
        return DataLoader(batches, batch_size=None, collate_fn=tuple)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y, text = batch
        assert text in ("of process 0", f"of process {rank_of_process()}")
        return torch.as_tensor(x), y


KINDS: dict[str, type[Split]] = {kind.__name__: kind for kind in (Drawn, Preview, Later, AtOnce, Arrays)}


@pytest.mark.parametrize("name", KINDS)
def test_tensor_parallel_ranks_draw_as_one_device(name: str, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, KINDS[name], TP, 2)
    expected = train(KINDS[name], None)
    assert_equals_one_device(outcomes, expected)
    said = [warning for warning in outcomes[0].warnings if "hold different rows" in warning]
    assert (len(said) > 0) == issubclass(KINDS[name], Later), said
    assert not expected.said("hold different rows")


class ByShard(Later):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch[0].clone())

    def extra(self) -> list[Tensor]:
        return self.seen


def test_each_shard_has_rows_of_its_own(worlds: Worlds) -> None:
    first, second, third, fourth = (outcome.extra for outcome in worlds(4).run(train, ByShard, MESH, 4))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(third, fourth, rtol=0, atol=0)
    assert not torch.equal(first[1], third[1])


class Seeded(Split):
    """Says by what number Lightning seeds the workers of its loader."""

    def extra(self) -> Any:
        return self.trainer.train_dataloader.worker_init_fn


def of_seeded_workers(workers: bool) -> Any:
    with mock.patch.dict(os.environ):
        seed_everything(1, workers=workers, verbose=False)
        return train(Seeded, MESH, 4).extra


def test_workers_are_seeded_by_batch_shard(worlds: Worlds) -> None:
    assert [init.keywords for init in worlds(4).run(of_seeded_workers, True)] == [{"rank": n} for n in (0, 0, 1, 1)]
    assert worlds(4).run(of_seeded_workers, False) == [None] * 4


class InOrder(Split):
    """A loader of rows that the Trainer may give a sampler: of one batch shard they keep the order of one device."""

    shuffle: ClassVar[bool] = False
    trainer_options: ClassVar[Mapping[str, Any]] = {"use_distributed_sampler": True}

    def loader(self, rank: int, shards: int) -> DataLoader:
        generator = torch.Generator().manual_seed(4)
        x, y = torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=self.shuffle)


class Shuffled(InOrder):
    """By torch's generator, which the test has seeded."""

    shuffle = True


class ShuffledByItsOwn(InOrder):
    """By a generator that the loader was given, which stands elsewhere on each rank."""

    def loader(self, rank: int, shards: int) -> DataLoader:
        dataset = super().loader(rank, shards).dataset
        generator = torch.Generator().manual_seed(7 + rank_of_process())
        return DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)


@pytest.mark.parametrize("kind", [InOrder, Shuffled, ShuffledByItsOwn])
def test_rows_come_in_the_order_of_one_device(kind: type[Split], worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, TP), train(kind, None))
