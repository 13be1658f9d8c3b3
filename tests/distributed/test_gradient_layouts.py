"""Gradients lie in memory as their parameters do: fused optimizers read both by one index, on a CPU unchecked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.jobs import Net, assert_equals_one_device, train
from tests.support.worlds import Worlds


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Fused(Net):
    """A fused optimizer, and whether gradients had other strides than their parameters at any step."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)

    def on_before_optimizer_step(self, optimizer):
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            own, gradient = local(parameter).stride(), local(parameter.grad).stride()
            if own != gradient:
                self.others.append(f"{name}: {own}, {gradient}")

    def extra(self) -> list[str]:
        return self.others


class Experts(Fused):
    """Weights of several experts, turned before the product: their gradients are computed turned, too."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": {"base": "ddp", "rules": {"experts": {"tp": "S(0)"}}}}

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 5, 6))
        self.net = nn.Linear(5, 3)

    def loss(self, batch):
        x, y = batch
        mixed = (x.expand(2, *x.shape) @ self.experts.transpose(1, 2)).sum(0)
        return F.cross_entropy(self.net(mixed), y)


class CompiledExperts(Experts):
    strategy: ClassVar[Mapping[str, Any]] = {**Experts.strategy, "compile": True}


class Columns(Fused):
    """Seven columns on two ranks: shards are padded in the graph, and cut out of what it gives."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"base": "fsdp", "rules": {"stored:net.2.weight": {"dp_shard": "S(1)"}}}
    }

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


class ChannelsLast(Fused):
    """Filters whose channels lie last."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 3, (1, 3)), nn.Flatten())
        self.net.to(memory_format=torch.channels_last)


class CompiledChannelsLast(ChannelsLast):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "compile": True}


class AddedChannelsLast(ChannelsLast):
    """Two micro-batches are one update."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class AddedExperts(Experts):
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class AddedColumns(Columns):
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class Deciding(ChannelsLast):
    """Decides by a value, so that it runs in forward mode, where losses are those of a rank's rows."""

    def loss(self, batch):
        loss = super().loss(batch)
        return loss * 2 if float(loss.detach()) > 0 else loss


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        (Experts, {"dp_shard": 1}),
        (Experts, {"dp_shard": 2}),
        (Experts, {"tp": 2}),
        (CompiledExperts, {"tp": 2}),
        (Columns, {"dp_shard": 2}),
        (ChannelsLast, {"dp_shard": 1}),
        (ChannelsLast, {"dp_shard": 2}),
        (CompiledChannelsLast, {"dp_shard": 2}),
        (AddedExperts, {"dp_shard": 1}),
        (AddedColumns, {"dp_shard": 2}),
        (AddedChannelsLast, {"dp_shard": 2}),
        (Deciding, {"dp_shard": 2}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_fused_optimizer_updates_as_on_one_device(kind: type[Fused], mesh: dict[str, int], worlds: Worlds):
    ranks = math.prod(mesh.values())
    outcomes = worlds(ranks).run(train, kind, mesh, ranks)
    expected = train(kind, None)
    if kind is Deciding:
        outcomes = [replace(outcome, losses=expected.losses) for outcome in outcomes]
    assert_equals_one_device(outcomes, expected)
    assert [outcome.extra for outcome in outcomes] == [[]] * ranks
