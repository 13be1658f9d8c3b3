"""Gradients lie in memory as their parameters do: fused optimizers read both by one index, on a CPU unchecked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.jobs import Net, assert_equals_one_device, make_strategy, make_trainer, train
from tests.numerics.training import full
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

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}

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


class AddedChannelsLast(ChannelsLast):
    """Two micro-batches are one update."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class AddedExperts(Experts):
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class AddedColumns(Columns):
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}


class Turned(Fused):
    """A weight whose rows lie side by side."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(10, 6).t())
        self.net = nn.Linear(10, 3)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(torch.tanh(x @ self.turned)), y)


class DecidingTurned(Turned):
    """In forward mode parameters of the step itself are whole, and gradients are cut when a backward has ended."""

    def loss(self, batch):
        loss = super().loss(batch)
        return loss * 2 if float(loss.detach()) > 0 else loss


class HookedChannelsLast(ChannelsLast):
    """A hook gives gradients that lie otherwise."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def on_fit_start(self):
        turn = (3, 2, 1, 0)
        self.net[1].weight.register_hook(lambda gradient: gradient.permute(turn).contiguous().permute(turn))


class TurnedLayer(nn.Module):
    """Multiplies with a weight whose rows lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(10, 6).t())

    def forward(self, x):
        return x @ self.turned


class Penalised(Fused):
    """In forward mode, where the gradient of a captured module is differentiated again."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(TurnedLayer(), nn.Tanh(), nn.Linear(10, 3))

    def loss(self, batch):
        x, y = batch
        x = x.detach().requires_grad_()
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        if float(loss.detach()) < 0:
            return loss
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return loss + 0.01 * gradient.square().sum(1).mean()


class Deciding(ChannelsLast):
    """Decides by a value, so that it runs in forward mode, where losses are those of a rank's rows."""

    def loss(self, batch):
        loss = super().loss(batch)
        return loss * 2 if float(loss.detach()) > 0 else loss


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        (Experts, {"dp_shard": 1}),
        (CompiledExperts, {"dp_shard": 1}),
        (Columns, {"dp_shard": 2}),
        (ChannelsLast, {"dp_shard": 2}),
        (AddedExperts, {"dp_shard": 1}),
        (AddedColumns, {"dp_shard": 2}),
        (AddedChannelsLast, {"dp_shard": 2}),
        (Deciding, {"dp_shard": 2}),
        (DecidingTurned, {"dp_shard": 2}),
        (HookedChannelsLast, {"dp_shard": 2}),
        (Penalised, {"dp_shard": 2}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_fused_optimizer_updates_as_on_one_device(kind: type[Fused], mesh: dict[str, int], worlds: Worlds):
    ranks = math.prod(mesh.values())
    outcomes = worlds(ranks).run(train, kind, mesh, ranks)
    expected = train(kind, None)
    if kind in (Deciding, DecidingTurned, Penalised):
        outcomes = [replace(outcome, losses=expected.losses) for outcome in outcomes]
    assert_equals_one_device(outcomes, expected)
    assert [outcome.extra for outcome in outcomes] == [[]] * ranks


class TwoEpochs(Turned):
    epochs = 2


class MoreChannelsLast(ChannelsLast):
    epochs = 2


def resumed(kind: type[Fused], mesh: dict[str, int] | None, path: str, save: bool) -> dict[str, Tensor]:
    """Weights after an epoch, which is saved, or after the second, from what was saved."""
    torch.manual_seed(0)
    module = kind()
    strategy = None if mesh is None else make_strategy(mesh, kind.strategy)

    def loader():
        if strategy is None:
            return module.loader(0, 1)
        return module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)

    module.train_dataloader = loader
    trainer = make_trainer(strategy, 1 if mesh is None else 2, max_epochs=1 if save else kind.epochs)
    trainer.fit(module, ckpt_path=None if save else path)
    if save:
        trainer.save_checkpoint(path)
    return {name: full(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "ours_saves"),
    [(TwoEpochs, False), (MoreChannelsLast, True), (MoreChannelsLast, False)],
    ids=["turned, of one device", "channels last, of ours", "channels last, of one device"],
)
def test_state_from_a_checkpoint_lies_as_parameters_do(
    kind: type[Fused], ours_saves: bool, worlds: Worlds, tmp_path: Path
):
    path, mesh = str(tmp_path / "first.ckpt"), {"dp_shard": 2}
    if ours_saves:
        worlds(2).run(resumed, kind, mesh, path, True)
    else:
        resumed(kind, None, path, True)
    alone = str(tmp_path / "alone.ckpt")
    resumed(kind, None, alone, True)
    expected = resumed(kind, None, alone, False)
    for found in worlds(2).run(resumed, kind, mesh, path, False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
