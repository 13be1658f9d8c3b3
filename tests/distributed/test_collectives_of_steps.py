"""Collectives that a step's own Python starts while other ranks are still on the way: they compute with parameters,
which all ranks gather, they have failed, or do not come at all.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autoparallel.errors import CaptureError
from tests.distributed.jobs import MESH, Net, failure, train
from tests.numerics.training import local_rows
from tests.support.worlds import Worlds


class OnSomeRanks(Net):
    """Rank 0 computes with more than rank 1 does, and then both talk; one device takes the mean of both."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp", "capture": "forward", "compile": False}

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(3, 1)

    def term(self, hidden: Tensor) -> Tensor:
        return self.aux(hidden).pow(2).mean()

    def joined(self, loss: Tensor) -> None:
        self.log("joined", loss, sync_dist=True)

    def of_rank(self, batch: Any, rank: int) -> Tensor:
        loss = self.loss(batch)
        return loss + self.term(self.net(batch[0])) if rank == 0 else loss

    def training_step(self, batch, batch_idx):
        if self.trainer.world_size == 1:
            return sum(self.of_rank(local_rows(batch, rank, 2), rank) for rank in range(2)) / 2
        loss = self.of_rank(batch, self.global_rank)
        self.joined(loss.detach())
        return loss


class Copies(OnSomeRanks):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp", "capture": "forward", "compile": False}


class ByAParameter(OnSomeRanks):
    def term(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.aux.weight.t()).pow(2).mean()


class Gathered(OnSomeRanks):
    def joined(self, loss: Tensor) -> None:
        assert self.all_gather(loss).shape == (2,)


class ByTorch(OnSomeRanks):
    """In a group of rank 0 alone, too, which rank 1 knows nothing of."""

    def on_fit_start(self) -> None:
        self.alone = dist.new_group([0]) if dist.is_initialized() else None

    def joined(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            dist.all_reduce(loss, group=self.alone)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, float(loss))
        total = loss.clone()
        dist.all_reduce(total)
        assert total.item() == pytest.approx(sum(found))


@pytest.mark.parametrize("kind", [OnSomeRanks, Copies, ByAParameter, Gathered, ByTorch])
def test_others_are_helped_until_they_come(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH, timeout_s=60):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


class Fails(OnSomeRanks):
    def term(self, hidden: Tensor) -> Tensor:
        raise CaptureError("no such rows")


class StaysAway(OnSomeRanks):
    def joined(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            dist.barrier()


@pytest.mark.parametrize(
    ("kind", "rank", "message"),
    [
        (Fails, 0, "no such rows"),
        (Fails, 1, "rank 0 stopped: no such rows"),
        (StaysAway, 0, "rank 0 at 'a collective of all ranks: barrier', rank 1 at 'the end of training_step"),
        (StaysAway, 1, "rank 0 at 'a collective of all ranks: barrier', rank 1 at 'the end of training_step"),
    ],
)
def test_who_waits_hears_of_it(kind: type[Net], rank: int, message: str, worlds: Worlds) -> None:
    assert message in worlds(2).run(failure, kind, MESH, timeout_s=60)[rank][0]
