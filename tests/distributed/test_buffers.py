"""Buffers are the same on all ranks in what these compute together, or the ranks say that they are not."""

from __future__ import annotations

import re
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_autoparallel.pipeline import buffers
from lightning_autoparallel.pipeline.agreement import ControlGroup
from tests.distributed import jobs
from tests.distributed.jobs import MESH, Outcome, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Centered(jobs.Net):
    """Subtracts a buffer that a hook changes, by `amount`."""

    strategy: ClassVar = {"capture": "step"}
    amount = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((x - self.center, y))

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.center += self.amount


class CenteredByItself(Centered):
    def setup(self, stage):
        self.amount = 1.0 + dist.get_rank()


class CenteredThroughData(CenteredByItself):
    """In a way that torch does not count."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.center.data += self.amount


class CenteredAtFirst(CenteredByItself):
    """In front of the first step, which is captured then."""

    def on_train_start(self):
        self.center = self.center + self.amount


@pytest.mark.parametrize("kind", [CenteredByItself, CenteredThroughData, CenteredAtFirst])
def test_ranks_whose_buffers_come_to_differ(kind: type[jobs.Net], worlds: Worlds) -> None:
    """Where nothing but whole steps was asked for; else steps go on as under DDP (tests/semantics)."""
    for text, _ in worlds(2).run(failure, kind, timeout_s=120):
        assert re.match(r"CaptureError: \w+\.py:\d+: buffer center, which the step reads, was changed", text)


class Normalized(Centered):
    """And one with buffers that the step itself changes."""

    strategy: ClassVar = {"capture": "step", "plan": "ddp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))

    def extra(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def train_counting() -> tuple[Outcome, list[str], int]:
    """What came out, what was digested of buffers, and how often ranks compared what they are about to do."""
    read, messages = [], []
    compare, begin = ControlGroup._compare, ControlGroup.begin

    def digest(tensor: torch.Tensor) -> str:
        read.append(str(tuple(tensor.shape)))
        return original(tensor)

    def count(*args: Any) -> Any:
        messages.append(args[1])
        return compare(*args)

    def count_begun(control: ControlGroup, text: str) -> Any:
        messages.append(text)
        return begin(control, text)

    original = buffers.digest
    with (
        mock.patch.object(buffers, "digest", digest),
        mock.patch.object(ControlGroup, "_compare", count),
        mock.patch.object(ControlGroup, "begin", count_begun),
    ):
        outcome = train(Normalized, MESH)
    return outcome, read, sum("StepIdentity" in str(message) for message in messages)


def test_only_what_something_else_than_the_step_changed_is_read(worlds: Worlds) -> None:
    """Neither batch norm's buffers nor those that nobody changes, and no rank is asked more often."""
    expected = train(Normalized, None)
    found = worlds(2).run(train_counting)
    assert_equals_one_device([outcome for outcome, _, _ in found], expected)
    for outcome, read, messages in found:
        torch.testing.assert_close(outcome.extra, expected.extra)
        assert read == ["(6,)"]
        assert messages == Normalized.steps + 1  # of the first step in front of its capture, too


class ValidatedWhole(jobs.Validated):
    """Its training runs on each rank's rows, its validation is captured whole."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = loss.item()
        return loss

    def extra(self) -> Any:
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return dict(self.trainer.strategy.modes), buffers


def test_a_validation_has_one_set_of_statistics(worlds: Worlds) -> None:
    """Where those of the training are each rank's own, it has rank 0's, which checkpoints have."""
    ranks = worlds(2).run(train, ValidatedWhole, MESH)
    module = ValidatedWhole()
    module.load_state_dict({**ranks[0].parameters, **ranks[0].extra[1]})
    module.eval()
    expected = torch.stack([module.loss(batch) for batch in module.batches()]).mean()
    for rank in ranks:
        assert rank.extra[0] == {"training_step": "forward", "validation_step": "step"}
        assert rank.metrics["val"] == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(rank.extra[1], ranks[0].extra[1], rtol=0, atol=0)


class OddlyHeld(jobs.Net):
    """A sparse buffer, and one that shows its few values again and again, which a hook changes on each rank otherwise.

    As under DDP steps take rank 0's.
    """

    strategy: ClassVar = {"capture": "forward"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixes", torch.eye(6).to_sparse())
        self.register_buffer("scale", torch.ones(6, 1).expand(6, 6))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((torch.sparse.mm(self.mixes, x.T).T * self.scale[:, 2], y))

    def on_train_batch_start(self, batch, batch_idx):
        self.scale[:, :1] += 0.1 + (dist.get_rank() if dist.is_initialized() else 0)


def test_sparse_and_expanded_buffers_are_held_as_they_are(worlds: Worlds) -> None:
    expected = train(OddlyHeld, None)
    for outcome in worlds(2).run(train, OddlyHeld, MESH, timeout_s=120):
        torch.testing.assert_close(outcome.parameters, expected.parameters)
