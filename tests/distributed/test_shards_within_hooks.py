"""What a hook wrote is in the shards at its next line; optimizers, logs and lists find them as on one device."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, Outcome, assert_equals_one_device, train
from tests.support.worlds import Worlds


def whole(tensor: Tensor) -> Tensor:
    """By torch's own way, which no function mode of torch sees."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Writes(Net):
    """A plain tensor meets the weight, then a part of it is written."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.net[2].weight
        with torch.no_grad():
            weight.mul_(torch.full((3, 10), 0.9))
            weight[0].fill_(1.0 + batch_idx)
            self.seen.append(whole(weight))
            nn.init.constant_(weight[1], 0.5)
            self.seen.append(whole(weight.data))
            torch.mul(weight[2], 2, out=weight[2])
            self.seen.append(whole(weight))
        self.after(batch_idx)

    def after(self, batch_idx: int) -> None:
        """More in the same hook."""

    def extra(self) -> Any:
        return self.seen


class Saves(Writes):
    def after(self, batch_idx: int) -> None:
        folder = Path(self.trainer.strategy.broadcast(tempfile.mkdtemp()))
        self.trainer.save_checkpoint(folder / "saved.ckpt")
        self.trainer.strategy.barrier()
        self.seen.append(torch.load(folder / "saved.ckpt", weights_only=True)["state_dict"]["net.2.weight"])


class LoadsItsOptimizer(Writes):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def after(self, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()) if batch_idx == 1 else optimizer.state_dict())


class Lists(Net):
    """Rows by lists of numbers, before anything whole has met the weight; tensors of other shapes are other tensors."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.seen.append(float(self.net[0].weight[[1, 0]].sum()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.net[0].weight
        weight.data[[0, 1]] = weight.data[[1, 0]]
        self.seen += [torch.equal(weight, self.net[0].bias), torch.equal(self.net[0].bias, weight)]

    def extra(self) -> Any:
        return self.seen


class LogsNumbers(Net):
    """Numbers of parameters, which all ranks have alike, reduced over them."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    epochs = 2

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.net[0].weight.detach()
        self.log("largest", weight.max(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("total", self.net[0].weight.sum(), sync_dist=True)

    def on_train_epoch_end(self):
        self.log_dict({"norm": self.net[2].weight.detach().norm(), "mean": self.net[2].weight.mean()}, sync_dist=True)


class LogsCopies(LogsNumbers):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class ReducesCopies(Writes):
    """What is reduced of a copy is another tensor than the copy."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        reduced = self.trainer.strategy.reduce(self.net[0].weight.detach(), reduce_op="sum")
        self.seen.append(reduced / self.trainer.world_size)


class LogsForward(LogsNumbers):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "forward"}

    def training_step(self, batch, batch_idx):
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")
        return self.loss(batch)


def _metrics(outcome: Outcome) -> dict[str, float]:
    return {name: value for name, value in outcome.metrics.items() if name != "rows"}


@pytest.mark.parametrize("kind", [Writes, Saves, LoadsItsOptimizer, Lists, LogsNumbers, LogsCopies, ReducesCopies])
def test_hooks_find_what_they_find_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    alone = train(kind, None)
    outcomes = worlds(2).run(train, kind, MESH)
    assert_equals_one_device(outcomes, alone)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, alone.extra, rtol=1e-5, atol=1e-6)


def test_numbers_of_parameters_are_logged_alike_in_forward_mode(worlds: Worlds) -> None:
    alone = train(LogsForward, None)
    for outcome in worlds(2).run(train, LogsForward, MESH):
        torch.testing.assert_close(_metrics(outcome), _metrics(alone), rtol=1e-5, atol=1e-6)
