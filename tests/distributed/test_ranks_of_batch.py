"""A step's own Python finds the batch's shards for ranks where several have the same rows, and that is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
import torchmetrics
from torch import Tensor

from tests.distributed.jobs import ByHand, Net, Validated, train
from tests.support.worlds import Worlds

RULES = {"net.0.weight": {"tp": "S(0)"}}
CUT: Mapping[str, Any] = {"capture": "forward", "plan": {"base": "fsdp", "rules": RULES}}
TP, BOTH = {"tp": 2}, {"dp_shard": 2, "tp": 2}
TOLD = "autoparallel: training_step asks for the ranks, and in steps they are the batch's"
OVER_ALL = "autoparallel: training_step calls collectives of torch.distributed"


class Counting(Validated):
    """Rows of all ranks, counted by torch's own function: the loss is that of one device on all of them."""

    strategy: ClassVar[Mapping[str, Any]] = CUT

    def loss(self, batch: Any) -> Tensor:
        rows, ranks = torch.tensor(float(len(batch[0]))), 1
        if dist.is_initialized():
            ranks = dist.get_world_size()
            dist.all_reduce(rows)
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") * ranks / rows


class Contrasting(Counting):
    """Rows of a rank beside those of all, gathered with their gradients."""

    def gathered(self, rows: Tensor) -> tuple[Tensor, int]:
        if not dist.is_initialized():
            return rows, 0
        return torch.cat(torch.distributed.nn.functional.all_gather(rows)), dist.get_rank()

    def loss(self, batch: Any) -> Tensor:
        rows = self.net(batch[0])
        others, rank = self.gathered(rows)
        own = torch.arange(len(rows)) + rank * len(rows)
        return F.cross_entropy(rows @ others.T, own)


class Gathering(torch.autograd.Function):
    """As libraries of losses write it."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


class ContrastingByHand(Contrasting):
    def gathered(self, rows: Tensor) -> tuple[Tensor, int]:
        if not dist.is_initialized():
            return rows, 0
        return Gathering.apply(rows).flatten(0, 1), dist.get_rank()


class ContrastingByLightning(Contrasting):
    def gathered(self, rows: Tensor) -> tuple[Tensor, int]:
        others = self.all_gather(rows, sync_grads=True).reshape(-1, rows.shape[-1])
        assert len(others) == len(rows) * self.trainer.world_size
        assert self.trainer.is_global_zero == (os.environ["RANK"] == "0" if dist.is_initialized() else True)
        return others, self.global_rank


class ByItsOwnHand(ByHand, Contrasting):
    """The backward is called within the step."""


CONTRASTING = [Contrasting, ContrastingByHand, ContrastingByLightning, ByItsOwnHand]


@pytest.mark.parametrize(
    ("kind", "mesh"), [(Counting, TP), (Counting, BOTH), *((kind, BOTH) for kind in CONTRASTING), (Contrasting, TP)]
)
def test_rows_count_once(kind: type[Net], mesh: Mapping[str, int], worlds: Worlds) -> None:
    ranks = 4 if mesh == BOTH else 2
    first, *others = worlds(ranks).run(train, kind, mesh, ranks)

    expected = train(kind, None)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(first.parameters[name], value, rtol=1e-4, atol=1e-5)
    assert len([said for said in first.warnings if said.startswith(TOLD)]) == 1
    assert not any(said.startswith(TOLD) for other in others for said in other.warnings)  # rank 0 speaks for all


class OverAll(Counting):
    """By the group of all ranks, kept from outside of the step."""

    def setup(self, stage: str) -> None:
        self.everyone = dist.group.WORLD

    def loss(self, batch: Any) -> Tensor:
        rows, ranks = torch.tensor(float(len(batch[0]))), 1
        if dist.is_initialized():
            ranks = dist.get_world_size(self.everyone)
            assert dist.get_rank(self.everyone) == int(os.environ["RANK"])
            dist.all_reduce(rows, group=self.everyone)
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") * ranks / rows


class OverItsOwn(OverAll):
    """By another group of all ranks."""

    def setup(self, stage: str) -> None:
        self.everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None


class OverTheMesh(Counting):
    """By a group of the mesh, whose ranks are places in it and of the world."""

    def loss(self, batch: Any) -> Tensor:
        rows, ranks = torch.tensor(float(len(batch[0]))), 1
        if dist.is_initialized():
            group = self.trainer.strategy.device_mesh["dp_shard"].get_group()
            ranks, place = dist.get_world_size(group), dist.get_rank(group)
            assert dist.get_global_rank(group, place) == int(os.environ["RANK"])
            dist.all_reduce(rows, group=group)
            first = torch.tensor(float(place))
            dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
            rows += first
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") * ranks / rows


@pytest.mark.parametrize(
    ("kind", "told"),
    [(OverAll, [OVER_ALL]), (OverItsOwn, [OVER_ALL]), (OverTheMesh, [])],
)
def test_groups_that_are_named_are_what_they_were(kind: type[Net], told: list[str], worlds: Worlds) -> None:
    first, *_ = worlds(4).run(train, kind, BOTH, 4)

    torch.testing.assert_close(first.parameters, train(kind, None).parameters, rtol=1e-4, atol=1e-5)
    found = [said for said in first.warnings if said.startswith((TOLD, OVER_ALL))]
    assert [said.partition(" over all")[0] for said in found] == told


class CountingInHooks(Validated):
    """Rows of all processes, by a hook; its other calls tell nothing of rows."""

    strategy: ClassVar[Mapping[str, Any]] = CUT

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if dist.is_initialized():
            assert dist.get_world_size() == 2
            dist.barrier()
            dist.broadcast(torch.zeros(1), src=0)
            dist.all_reduce(torch.tensor(float(len(batch[0]))))

    def on_train_epoch_end(self):
        self.all_gather(torch.zeros(1))


@pytest.mark.parametrize(("mesh", "told"), [(TP, ["on_train_batch_end"]), ({"dp_shard": 2}, [])])
def test_hooks_count_processes_and_are_told(mesh: Mapping[str, int], told: list[str], worlds: Worlds) -> None:
    first, _ = worlds(2).run(train, CountingInHooks, mesh)
    found = [said for said in first.warnings if "torch.distributed" in said and "same rows" in said]
    assert [said.split()[1] for said in found] == told


class Summing(Validated):
    """Rows, by metrics that name no group and that of all processes."""

    strategy: ClassVar[Mapping[str, Any]] = CUT

    def setup(self, stage: str) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        self.sums = [torchmetrics.SumMetric(), torchmetrics.SumMetric(process_group=group)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for metric in self.sums:
            metric.update(len(batch[0]))

    def on_train_end(self):
        self.found = [float(metric.compute()) for metric in self.sums]

    def extra(self) -> Any:
        return self.found


@pytest.mark.parametrize("mesh", [TP, BOTH], ids=str)
def test_metrics_of_all_processes_count_rows_once(mesh: Mapping[str, int], worlds: Worlds) -> None:
    ranks = 4 if mesh == BOTH else 2
    outcomes = worlds(ranks).run(train, Summing, mesh, ranks)
    assert [outcome.extra for outcome in outcomes] == [train(Summing, None).extra] * ranks
