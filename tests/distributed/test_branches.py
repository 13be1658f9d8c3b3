"""Python in a step decides as on one device; what it does besides computing is named."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class ByBatchIndex(Net):
    epochs = 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 2 if batch_idx % 2 == 0 else loss


class ByGlobalStep(Net):
    epochs = 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 3 if self.global_step < 3 else loss


class ByEpoch(Net):
    epochs = 3

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.current_epoch == 1:
            loss = loss + self.net[0].weight.pow(2).mean()
        return loss


class ByTrainersStep(Net):
    epochs = 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        scale = 2.0 if self.trainer.global_step == 5 else 1.0
        self.log("scale", scale)
        return loss * scale


@pytest.mark.parametrize("kind", [ByBatchIndex, ByGlobalStep, ByEpoch, ByTrainersStep])
def test_a_branch_takes_the_side_of_one_device(kind, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, kind, MESH)
    assert_equals_one_device(outcomes, train(kind, None))
    assert outcomes[0].said("training_step is captured again for another branch: capture 2 of at most 8") == 1
    assert outcomes[0].said("captured again") == 1


class Unfreezes(Net):
    epochs = 3

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch == 1)


def test_freezing_between_epochs(worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, Unfreezes, MESH)
    expected = train(Unfreezes, None)
    assert_equals_one_device(outcomes, expected)
    torch.manual_seed(0)
    assert not torch.equal(expected.parameters["net.0.weight"], Unfreezes().net[0].weight)


class Prints(Net):
    strategy: ClassVar = {"capture": "step"}

    def training_step(self, batch, batch_idx):
        print("training")
        return self.loss(batch)


class WritesToTheLogger(Net):
    strategy: ClassVar = {"capture": "step"}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return loss


class Draws(Net):
    strategy: ClassVar = {"capture": "step"}

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * random.random()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Prints, "print() in test_branches.py"),
        (WritesToTheLogger, "self.logger.experiment.add_scalar() in test_branches.py"),
        (Draws, "draws from Python's random"),
    ],
)
def test_what_would_run_at_capture_only_is_refused(kind, text: str, worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, kind):
        assert text in message


class Keeps(Net):
    """Counts, keeps outputs and the last loss, and multiplies by what a hook sets."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.n, self.last, self.beta = 0, None, 0.0

    def on_train_batch_start(self, batch, batch_idx):
        self.beta = 1.0 + batch_idx

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.n += 1
        self.last = loss.detach() * self.n
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"] * batch_idx)
        return loss * self.beta + self.global_step

    def extra(self):
        return [float(value) for value in (*self.kept, self.n, self.last)]


def test_what_a_step_keeps_is_that_of_one_device(worlds: Worlds) -> None:
    outcomes, expected = worlds(2).run(train, Keeps, MESH), train(Keeps, None)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra)
    assert outcomes[0].said("is captured again: self.beta was 1.0 and is 2.0") == 1
    assert outcomes[0].said("captured again") == 1


class Dropout(Net):
    """Half of the features are dropped; the mask of every row is logged."""

    steps = 3

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []
        self.noise: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        mask = self.dropout(torch.ones_like(x))
        noise = torch.randn(6)
        return {"loss": self.loss((x * mask + noise, y)), "mask": mask, "noise": noise}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["mask"].clone())
        self.noise.append(outputs["noise"].clone())

    def extra(self):
        return torch.stack(self.seen), torch.stack(self.noise)


class ReplicatedDropout(Dropout):
    strategy: ClassVar = {"plan": "ddp"}


@pytest.mark.parametrize("kind", [Dropout, ReplicatedDropout])
def test_random_draws(kind, worlds: Worlds) -> None:
    first, second = worlds(2).run(train, kind, MESH)
    again = worlds(2).run(train, kind, MESH)
    (masks, noise), (other_masks, other_noise) = first.extra, second.extra
    assert masks.shape == (3, 4, 6)
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(masks, other_masks)  # rows are dropped independently on each rank
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3  # and at each step
    assert len({tuple(row.tolist()) for row in noise}) == 3
    torch.testing.assert_close(noise, other_noise, rtol=0, atol=0)  # one draw of the global step
    assert first.losses == second.losses
    torch.testing.assert_close(first.parameters, second.parameters, rtol=0, atol=0)
    torch.testing.assert_close(again[0].extra, first.extra, rtol=0, atol=0)
    assert again[0].losses == first.losses
