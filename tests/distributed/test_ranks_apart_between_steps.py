"""Ranks that are in different places between steps find out, and where each is; copies and numbers that hooks take."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.jobs import (
    MESH,
    Net,
    Validated,
    assert_equals_one_device,
    failure,
    make_strategy,
    make_trainer,
    train,
)
from tests.support.worlds import Worlds

SECONDS = 60  # a group's timeout is far longer


MOVES = "has torch gather or move a parameter or gradient"
AHEAD = "gives {} a gradient or parameter, ahead of an update"


class Sharded(Net):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}


class AsksAlone(Sharded):
    """Rank 0 alone reads a number of a weight behind a batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            self.net[0].weight.norm().item()


class ComputesAlone(Sharded):
    """Rank 0 alone computes what torch gathers shards for."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            self.net[0].weight.detach().softmax(0)


class GathersAlone(Sharded):
    """Rank 0 alone gathers a weight."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            self.net[0].weight.full_tensor()


class GathersGradientAlone(Sharded):
    """The same of a gradient, before it is used."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 1 and self.global_rank == 0:
            self.net[0].weight.grad.full_tensor()


class GathersClippingAlone(Sharded):
    """The same where gradients are clipped."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step == 1 and self.global_rank == 0:
            self.net[0].weight.grad.full_tensor()


class NormsGradientsAlone(Sharded):
    """Torch's rule adds up what ranks have of it, without a word of the user's for that."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 1 and self.global_rank == 0:
            torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()


class NormsBehindBackwardAlone(Sharded):
    def on_after_backward(self):
        if self.global_step == 1 and self.global_rank == 0:
            self.net[0].weight.grad.softmax(0)


class NormsClippingAlone(Sharded):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step == 1 and self.global_rank == 0:
            self.net[0].weight.grad.abs().max()


class NormsOnceMore(Sharded):
    """By the line by which all ranks did before."""

    def norm(self):
        return self.net[0].weight.grad.norm()

    def on_before_optimizer_step(self, optimizer):
        self.norm()
        if self.global_step == 1 and self.global_rank == 0:
            self.norm()


class StopsAlone(Sharded):
    """Rank 1 alone ends its training early."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.trainer.should_stop = True


class Rows(IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class ValidatesLonger(Validated):
    """Rank 1 has one batch more to validate on, in a loader without a length."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    trainer_options: ClassVar[Mapping[str, Any]] = {"val_check_interval": 2}

    def val_dataloader(self):
        return DataLoader(Rows(self.batches()[: 2 + dist.get_rank()]), batch_size=None)


class OtherModule(Sharded):
    """Rank 1 has a larger last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(10, 3 + dist.get_rank())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AsksAlone, "test_ranks_apart_between_steps.py:"),
        (ComputesAlone, MOVES),
        (GathersAlone, MOVES),
        (GathersGradientAlone, MOVES),
        (GathersClippingAlone, MOVES),
        (NormsGradientsAlone, AHEAD.format("linalg_vector_norm")),
        (NormsOnceMore, "linalg_vector_norm a gradient or parameter"),
        (NormsBehindBackwardAlone, "softmax a gradient or parameter"),
        (NormsClippingAlone, AHEAD.format("max")),
        (StopsAlone, "its run's end"),
        (ValidatesLonger, "validation_step"),
        (OtherModule, "net.2.weight is (3, 10) torch.float32 on rank 0 and (4, 10) torch.float32 on rank 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_find_out(kind: type[Net], said: str, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert said in text


class ToldToEnd(Sharded):
    """Rank 1 gets a signal, in the middle of what it does between two batches."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def end_of_training() -> tuple[str, bool]:
    """How the training ends, and whether the Trainer says that it was told to end."""
    module = ToldToEnd()
    module.train_dataloader = lambda: module.loader(0, 1)
    trainer = make_trainer(make_strategy(MESH, ToldToEnd.strategy), 2)
    try:
        trainer.fit(module)
    except BaseException as error:
        return type(error).__name__, trainer.received_sigterm
    return "trained on", trainer.received_sigterm


def test_a_signal_to_one_rank_ends_all(worlds: Worlds) -> None:
    assert worlds(2).run(end_of_training, timeout_s=SECONDS) == [("SIGTERMException", True)] * 2


class OtherRates(Sharded):
    """Its rate follows from what only one rank has seen."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.optimizers().param_groups[0]["lr"] = 0.05


class OtherMomentum(Sharded):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5 + 0.1 * dist.get_rank())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OtherRates, "lr of group 0 of optimizer 0 is 0.1 on rank 0 and 0.05 on rank 1"),
        (OtherMomentum, "momentum of group 0 of optimizer 0 is 0.5 on rank 0 and 0.6 on rank 1"),
    ],
)
def test_optimizers_that_differ_are_said_once(kind: type[Net], said: str, worlds: Worlds) -> None:
    first, second = worlds(2).run(train, kind, MESH, timeout_s=SECONDS)
    assert (first.said(said), first.said("optimizers differ"), len(second.losses)) == (1, 1, kind.steps)


class Kept(Sharded):
    """The best module so far as a copy, numbers of weights for a histogram, and one as text, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.inference_mode():
            kept = copy.deepcopy(self.net[2])
        best, weight = copy.deepcopy(self.net), self.net[0].weight
        torch.testing.assert_close(kept.weight.sum().item(), best[2].weight.sum().item())
        assert best[0].weight is not weight and best[0].weight.grad is None and best[0].weight.requires_grad
        counts, _ = np.histogram(weight.detach().numpy(), bins=4)
        self.kept.append((counts.tolist(), f"{weight.mean():.4f}", weight[0].tolist(), float(best[2].weight.sum())))

    def extra(self) -> Any:
        return self.kept


class KeptCopies(Kept):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


@pytest.mark.parametrize("kind", [Kept, KeptCopies])
def test_copies_and_numbers_in_hooks_are_those_of_one_device(kind: type[Kept], worlds: Worlds) -> None:
    expected = train(kind, None)
    outcomes = worlds(2).run(train, kind, MESH)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        for (*exact, row, total), (*exact_1, row_1, total_1) in zip(outcome.extra, expected.extra, strict=True):
            assert exact == exact_1
            torch.testing.assert_close((row, total), (row_1, total_1), rtol=1e-5, atol=1e-6)


class LooksAlone(Sharded):
    """Under ddp, rank 0 alone looks at its copy."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0:
            self.net[0].weight.detach().cpu().numpy().mean()


def test_one_rank_may_look_at_its_copy(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, LooksAlone, MESH, timeout_s=SECONDS), train(LooksAlone, None))
