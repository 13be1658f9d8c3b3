"""Steps that cannot be captured whole, where that is asked for, are refused on every rank before anything has run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.jobs import MESH, failure, train
from tests.support.worlds import Worlds

FILE = Path(__file__).name
SECONDS = 120  # generous: a hang would last until the collectives' timeout, 30 minutes


class Net(jobs.Net):
    """Must be captured whole; knows its rank."""

    strategy: ClassVar = {"capture": "step"}

    def setup(self, stage):
        self.my_rank = dist.get_rank()


def line_of(kind: type, text: str) -> str:
    """`file:line` of the line of `kind` that ends with the comment `text`."""
    lines, start = inspect.getsourcelines(kind)
    return f"{FILE}:{next(start + i for i, line in enumerate(lines) if line.rstrip().endswith(f'# {text}'))}"


class ReadsItem(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = loss.item()  # here
        return loss


class BranchesOnTensor(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loss > 1:  # here
            loss = loss * 2
        return loss


class SelectsByValue(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x[y > 0], y[y > 0]))  # here


class AsksForTheRank(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * dist.get_rank()  # here


class NamesByBatchIndex(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log(f"loss_{batch_idx}", loss)  # here
        return loss


class ReturnsNothing(Net):
    def training_step(self, batch, batch_idx):
        self.loss(batch)


class ReturnsRows(Net):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0])


CASES = [
    (ReadsItem, "reads a tensor's value (.item()); use torch.where or log the tensor"),
    (BranchesOnTensor, "reads a tensor's value (if loss > 1:  # here); use torch.where or log the tensor"),
    (SelectsByValue, "makes a shape that depends on a tensor's values"),
    (AsksForTheRank, "asks for the ranks (torch.distributed.get_rank): a captured step is one program"),
    (NamesByBatchIndex, "decides by `text of batch_idx` differently at nearly every step"),
]


@pytest.mark.parametrize(("kind", "message"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_line_and_the_remedy(kind, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind):
        assert text.startswith(f"CaptureError: {line_of(kind, 'here')} {message}")


class TransformsShards(Net):
    """Gradients of single rows, of parameters that lie in shards."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def row(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(self.net, parameters, (x[None],)), y[None])

    def training_step(self, batch, batch_idx):
        given = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(self.row), (None, 0, 0))(given, *batch)  # here
        return each["0.bias"].mean()


def test_transforms_of_shards_are_refused(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, TransformsShards):
        assert "transforms (torch.func) a function of parameters that lie in shards: give it whole ones" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReturnsNothing, "training_step returned NoneType, not a loss: return a tensor, or a dict with 'loss'"),
        (ReturnsRows, "training_step returned a loss of shape (8, 3): reduce it to one number, e.g. .mean()"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_loss(kind, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind):
        assert message in text


class DependsOnRank(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.my_rank == 1:
            loss = loss * 2  # here
        return loss


class DependsOnRankLater(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 2 and self.my_rank == 1:
            loss = loss * 2
        return loss


class FailsOnOneRank(Net):
    def training_step(self, batch, batch_idx):
        if self.my_rank == 1:
            raise KeyError("only here")
        return self.loss(batch)


class ReadsItemOnOneRank(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.my_rank == 1:
            loss.item()  # here
        return loss


class FreezesOnOneRank(Net):
    def on_train_start(self):
        self.net[0].weight.requires_grad_(self.my_rank == 0)


class FoundDependsOnRank(DependsOnRank):
    strategy: ClassVar = {**Net.strategy, "plan": "auto"}


@pytest.mark.parametrize("kind", [DependsOnRank, FoundDependsOnRank])
def test_ranks_that_compute_different_things(kind, worlds: Worlds) -> None:
    for text, seconds in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert text.startswith("CaptureError: rank 1's graph differs at node mul")
        assert f"({line_of(DependsOnRank, 'here')}) from rank 0's: every rank must run the same step" in text
        assert seconds < SECONDS


class DividesByItsOwnNumber(Net):
    """Its number becomes an input of the step at the second batch, and another one on each rank at the third."""

    number = 8.0

    def on_train_batch_start(self, batch, batch_idx):
        self.number = 8.0 if batch_idx == 0 else 9.0 if batch_idx == 1 else 10.0 + self.my_rank

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.number


class AddsItsOwnTensor(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.shift = torch.full((), 8.0 if batch_idx < 3 else 9.0 + self.my_rank)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.shift


class ChangesItsOwnTensor(AddsItsOwnTensor):
    """In a way that torch does not count."""

    shift = torch.full((), 8.0)

    def on_train_batch_start(self, batch, batch_idx):
        self.shift.data.fill_(8.0 if batch_idx < 3 else 9.0 + self.my_rank)


@pytest.mark.parametrize("kind", [DividesByItsOwnNumber, AddsItsOwnTensor, ChangesItsOwnTensor])
def test_ranks_that_feed_a_step_differently(kind, worlds: Worlds) -> None:
    """One graph on all ranks, which read their own numbers for it: nobody would see."""
    for text, seconds in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert re.match(
            rf"CaptureError: {FILE}:\d+: what the step reads beside its batch \(attributes, numbers\) is", text
        )
        assert "on rank 0, and all ranks compute one step together" in text and seconds < SECONDS


def train_without_asking_for_whole_steps() -> jobs.Outcome:
    class Anyhow(DividesByItsOwnNumber):
        strategy: ClassVar = {}

    return train(Anyhow, MESH)


def train_as_each_rank_for_itself() -> jobs.Outcome:
    class Apart(DividesByItsOwnNumber):
        strategy: ClassVar = {"capture": "forward"}

    return train(Apart, MESH)


def test_where_they_may_each_rank_goes_on_with_its_own_number(worlds: Worlds) -> None:
    """As under DDP."""
    ranks, apart = worlds(2).run(train_without_asking_for_whole_steps), worlds(2).run(train_as_each_rank_for_itself)
    assert ranks[0].said("training_step runs in forward mode") == 1
    for mine, theirs in zip(ranks, apart, strict=True):
        torch.testing.assert_close(mine.parameters, theirs.parameters, rtol=1e-5, atol=1e-6)


def test_ranks_that_branch_differently_at_a_later_step(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, DependsOnRankLater, timeout_s=SECONDS):
        assert "ranks took different branches of the step" in text or "rank 1's graph differs at node" in text


def test_ranks_that_freeze_different_parameters(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, FreezesOnOneRank, timeout_s=SECONDS):
        assert "training_step: rank 1 froze other parameters than rank 0" in text


def test_an_error_of_one_rank_stops_all(worlds: Worlds) -> None:
    first, second = worlds(2).run(failure, FailsOnOneRank, timeout_s=SECONDS)
    assert first[0] == "CaptureError: rank 1 stopped: KeyError: 'only here'"
    assert re.fullmatch(rf"CaptureError: {FILE}:\d+: this rank alone stopped: KeyError: 'only here'", second[0])


def test_a_read_value_of_one_rank_stops_all(worlds: Worlds) -> None:
    first, second = worlds(2).run(failure, ReadsItemOnOneRank, timeout_s=SECONDS)
    message = f"{line_of(ReadsItemOnOneRank, 'here')} reads a tensor's value (.item())"
    assert f"rank 1 stopped: {message}" in first[0]
    assert message in second[0]


class RankLaterFails(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.my_rank == 1:
            raise KeyError("at the third step")
        return self.loss(batch)


def test_an_error_of_one_rank_at_a_later_capture_stops_all(worlds: Worlds) -> None:
    first, second = worlds(2).run(failure, RankLaterFails, timeout_s=SECONDS)
    assert "KeyError: 'at the third step'" in first[0]
    assert "KeyError: 'at the third step'" in second[0]


class DecidesByBatchIndex(Net):
    steps = 10
    strategy: ClassVar = {"capture": "step", "max_captures": 3}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * torch.ones(int(batch_idx) + 1).mean()  # here


def test_a_branch_that_differs_at_every_step(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, DecidesByBatchIndex, MESH):
        line = line_of(DecidesByBatchIndex, "here")
        expected = f"{line} decides by `(int(batch_idx) + 1)` differently at nearly every step"
        assert text.startswith(f"CaptureError: {expected}")


class NeedsItsStart(Net):
    """Can be captured from ``on_train_start`` on."""

    strategy: ClassVar = {"max_captures": 1}

    def on_train_start(self):
        self.factor = torch.tensor(2.0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.factor


def test_a_step_may_need_what_hooks_before_it_set_up(worlds: Worlds) -> None:
    outcome, _ = worlds(2).run(train, NeedsItsStart, MESH)
    assert outcome.said("forward mode") == outcome.said("captured again") == 0
    assert len(outcome.losses) == NeedsItsStart.steps
