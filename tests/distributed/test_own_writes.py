"""What a step's own Python writes into parameters in shards by what this rank's rows say."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel.errors import AutoParallelError
from tests.distributed.jobs import Net, Outcome, train
from tests.support.worlds import Worlds


class Scaled(Net):
    """Looks up rows of a table that are not to be long, at most steps some that no other rank does."""

    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.table = self.made()

    def made(self) -> nn.Module:
        return nn.Embedding(9, 6, max_norm=0.5)

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(2)
        return [(*pair, torch.randint(0, 9, (self.rows,), generator=generator)) for pair in super().batches()]

    def looked_up(self, rows: Tensor) -> Tensor:
        return self.table(rows)

    def loss(self, batch: Any) -> Tensor:
        x, y, rows = batch
        return F.cross_entropy(self.net(x + self.looked_up(rows)), y)


class OtherNorm(Scaled):
    """By the largest of a row."""

    def made(self) -> nn.Module:
        return nn.Embedding(9, 6, max_norm=0.2, norm_type=float("inf"), padding_idx=1)


class Bags(Scaled):
    """Sums of rows."""

    def made(self) -> nn.Module:
        return nn.EmbeddingBag(9, 6, max_norm=0.5, mode="sum")

    def looked_up(self, rows: Tensor) -> Tensor:
        return self.table(torch.stack([rows, (rows + 1) % 9], 1))


class WeightedBags(Bags):
    """By a parameter, which lies in shards, too: one for each of a rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(4, 2))

    def looked_up(self, rows: Tensor) -> Tensor:
        return self.table(torch.stack([rows, (rows + 1) % 9], 1), per_sample_weights=self.weights)


class Function(Scaled):
    """By torch's function."""

    def looked_up(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.table.weight, max_norm=0.5)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("kind", [Scaled, OtherNorm, Bags, Function], ids=lambda kind: kind.__name__)
def test_rows_that_any_rank_looks_up_are_scaled(kind: type[Net], mesh: dict[str, int], worlds: Worlds):
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, mesh):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_rows_may_lie_in_shards_too(worlds: Worlds):
    first, second = worlds(2).run(train, WeightedBags, {"dp_shard": 2})
    torch.testing.assert_close(first.parameters, second.parameters, rtol=0, atol=0)
    assert not torch.equal(first.parameters["weights"], WeightedBags().weights)
    assert first.parameters["table.weight"].norm(dim=1).max() < 1  # norms are of the last lookup, before an update


class NoSuchRow(Scaled):
    """Asked for by one rank."""

    def looked_up(self, rows: Tensor) -> Tensor:
        return self.table(rows + 9 * self.global_rank)


def test_a_row_that_is_not_there_is_an_error_on_all_ranks(worlds: Worlds):
    for error in worlds(2).run(wrong_row, timeout_s=60):  # a rank that waits for the other is an error here
        assert "index out of range" in error


def wrong_row() -> str:
    try:
        train(NoSuchRow, {"dp_shard": 2})
    except (AutoParallelError, IndexError) as error:
        return str(error)
    return "no error"


class Writes(Net):
    """Copies this rank's mean."""

    strategy: ClassVar[dict[str, Any]] = {"capture": "forward"}

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.table = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(4, 6))

    def training_step(self, batch, batch_idx):
        self.write(*batch)
        return self.loss((batch[0] - self.shift + self.table.sum(0), batch[1]))

    @torch.no_grad()
    def write(self, x: Tensor, y: Tensor) -> None:
        self.shift.copy_(x.mean(0))


class Data(Writes):
    def write(self, x: Tensor, y: Tensor) -> None:
        self.shift.data = x.mean(0)


class Rows(Writes):
    """Those that the labels say."""

    def write(self, x: Tensor, y: Tensor) -> None:
        self.table.data[y] = 0.5


class View(Writes):
    """Only where a rank's rows say so."""

    def write(self, x: Tensor, y: Tensor) -> None:
        if float(x[0, 0]) > 0:
            self.table.data.view(-1)[3:].add_(1.0)


class Number(Writes):
    @torch.no_grad()
    def write(self, x: Tensor, y: Tensor) -> None:
        self.shift.fill_(float(x.mean()))


class Expanded(Writes):
    """A number in the place of many."""

    @torch.no_grad()
    def write(self, x: Tensor, y: Tensor) -> None:
        self.shift.copy_(x.mean().expand(6))


OWN = {
    Expanded: "parameter shift",
    Writes: "parameter shift",
    Data: "parameter shift",
    Rows: "parameter table",
    View: "parameter table",
    Number: "parameter shift",
}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_what_each_rank_writes_for_itself_is_said(kind: type[Net], worlds: Worlds):
    outcome = worlds(2).run(train, kind, {"dp_shard": 2})[0]
    assert outcome.said(f"different values into {OWN[kind]}, in training_step") == 1


class Common(Writes):
    """What ranks have in common, in many ways."""

    def write(self, x: Tensor, y: Tensor) -> None:
        mean = self.all_gather(x.mean(0)).mean(0)
        with torch.no_grad():
            self.shift.copy_(mean).mul_(0.5).add_(mean, alpha=0.5)
            self.table[1:3] = mean
            self.table.view(-1)[3:].add_(1.0)
            self.table.lerp_(self.table * 2, 0.1)
        self.shift.data = self.shift.data * 2


def test_nothing_is_said_of_what_they_have_in_common(worlds: Worlds):
    assert not worlds(2).run(train, Common, {"dp_shard": 2})[0].said("different values")


class Copies(Rows):
    strategy: ClassVar[dict[str, Any]] = {"capture": "forward", "plan": "ddp"}


def test_copies_keep_what_their_ranks_write_as_under_ddp(worlds: Worlds):
    assert not worlds(2).run(train, Copies, {"dp_replicate": 2})[0].said("different values")


class InHook(Net):
    """Before the first step, whose graph is one for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.is_begun = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x - self.shift), y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.is_begun:
            self.is_begun = True
            self.write(batch[0])

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        self.shift.copy_(x.mean(0))


class DataInHook(InHook):
    def write(self, x: Tensor) -> None:
        self.shift.data = x.mean(0)


class NumberInHook(InHook):
    def write(self, x: Tensor) -> None:
        self.shift.data.fill_(x.mean())


class RowInHook(InHook):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        self.shift[:2] = x.mean(0)[:2]


class FactorInHook(InHook):
    """A number, by which what is there is changed."""

    def write(self, x: Tensor) -> None:
        self.shift.data.add_(float(x.mean()))


class InitInHook(InHook):
    def write(self, x: Tensor) -> None:
        nn.init.constant_(self.shift, float(x.mean()))


class ListInHook(InHook):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        torch._foreach_add_([self.shift], float(x.mean()))


class ForwardHook(InHook):
    strategy: ClassVar[dict[str, Any]] = {"capture": "forward"}


IN_HOOKS = [InHook, DataInHook, NumberInHook, RowInHook, FactorInHook, InitInHook, ListInHook, ForwardHook]


@pytest.mark.parametrize("kind", IN_HOOKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_so_is_what_hooks_write(kind: type[Net], plan: str, worlds: Worlds):
    outcome = worlds(2).run(hooked, kind, plan)[0]
    said = kind is not ForwardHook or plan == "fsdp"  # of copies each rank's own stays its own there, as under DDP
    assert outcome.said("different values into parameter shift, in training_step") == said


def hooked(kind: type[Net], plan: str) -> Outcome:
    kind.strategy = {**kind.strategy, "plan": plan}
    return train(kind, {"dp_shard": 2} if plan == "fsdp" else {"dp_replicate": 2})


class OwnGradients(InHook):
    """Assigned behind a backward."""

    def write(self, x: Tensor) -> None:
        """Nothing before a step."""

    def on_after_backward(self) -> None:
        self.shift.grad = torch.full((6,), float(self.global_rank))


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_so_are_gradients_of_ranks_own(plan: str, worlds: Worlds):
    outcome = worlds(2).run(hooked, OwnGradients, plan)[0]
    assert outcome.said("different values into the gradient of parameter shift, in training_step") == 1


class CommonInHook(InHook):
    """What ranks have in common, and numbers that are drawn, by generators that differ."""

    def write(self, x: Tensor) -> None:
        torch.manual_seed(self.global_rank)
        mean = self.all_gather(x.mean(0)).mean(0)
        with torch.no_grad():
            self.shift.copy_(mean).mul_(0.5).add_(0.1)
        self.net[0].reset_parameters()
        nn.init.normal_(self.net[2].weight)


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_nothing_is_said_of_what_hooks_have_in_common(plan: str, worlds: Worlds):
    first, second = worlds(2).run(hooked, CommonInHook, plan)
    assert not first.said("different values")
    torch.testing.assert_close(first.parameters, second.parameters, rtol=0, atol=0)
