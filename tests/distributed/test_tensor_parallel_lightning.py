"""Lightning's side of tensor parallelism: ranks that share rows log, count, clip, save and decide as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.jobs import Net, assert_equals_one_device, failure, make_strategy, make_trainer, train
from tests.distributed.test_clipping import Launches
from tests.support.worlds import Worlds

MESH = {"dp_shard": 2, "tp": 2}
RULES = {"net.0.weight": {"tp": "S(0)"}, "net.0.bias": {"tp": "S(0)"}, "net.2.weight": {"tp": "S(1)"}}


class Split(Net):
    """Two layers, cut by column and by row over tp and over the batch axis besides."""

    epochs = 2
    strategy: ClassVar[Mapping[str, Any]] = {"plan": {"base": "fsdp", "rules": RULES}}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))


class SplitAndLogged(Split):
    """Values of rows, of the whole batch, and metrics of both."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.rows_seen = torchmetrics.SumMetric()
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("now", self.accuracy(scores, y), on_step=True, on_epoch=False)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.rows_seen.update(torch.ones_like(y))
        self.total.update(loss)
        self.log("rows_seen", self.rows_seen, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return loss


class SplitAndClipped(Split):
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.launches = Launches()

    def callbacks(self):
        return [self.launches]

    def extra(self) -> Any:
        return self.launches.counts


@pytest.mark.parametrize("kind", [SplitAndLogged, SplitAndClipped])
def test_ranks_that_share_rows_count_them_once(kind, worlds: Worlds) -> None:
    outcomes = worlds(4).run(train, kind, MESH, 4)
    assert_equals_one_device(outcomes, train(kind, None))
    if kind is SplitAndClipped:
        assert [outcome.extra for outcome in outcomes] == [[1] * 4] * 4


class Averaged(Split):
    """A copy of the module that no rule of the plan names, averaged by torch's functions of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))  # uneven parts
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x)[:, 0], y.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)


def test_copies_that_lie_otherwise_are_averaged(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(4).run(train, Averaged, MESH, 4), train(Averaged, None))


class SplitAndMixed(Split):
    """Weights cast by autocast before they are gathered over the batch axis; partial sums of bfloat16 over tp."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-mixed"}


class SplitAndHalf(Split):
    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-true"}


@pytest.mark.parametrize(("kind", "tolerance"), [(SplitAndMixed, 2e-3), (SplitAndHalf, 2e-2)])
def test_narrow_training_is_that_of_one_device(kind, tolerance: float, worlds: Worlds) -> None:
    expected = train(kind, None)
    for outcome in worlds(4).run(train, kind, MESH, 4):
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=tolerance, atol=0)
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=0, atol=tolerance)


def decisions() -> dict[str, Any]:
    """What ranks agree on by the strategy's own means, each giving its rank."""
    module = Split()
    strategy = make_strategy(MESH, Split.strategy)
    mine: dict[str, Any] = {}

    def ask() -> None:
        rank = float(dist.get_rank())
        mine["mean"] = float(strategy.reduce(torch.tensor(rank)))
        mine["sum"] = float(strategy.reduce(torch.tensor(rank), reduce_op="sum"))
        mine["gathered"] = strategy.all_gather(torch.tensor(rank)).tolist()
        mine["gathered by the module"] = module.all_gather({"rank": torch.tensor(rank)})["rank"].tolist()
        own = torch.tensor([rank], requires_grad=True)
        everyone = module.all_gather(own, sync_grads=True).flatten()
        (everyone * torch.tensor([1.0, 10.0]) * (1 + rank)).sum().backward()
        mine["its gradient"] = own.grad.tolist()
        mine["of all"] = float(strategy.reduce(torch.tensor(rank), group=dist.group.WORLD, reduce_op="sum"))
        mine["unanimous"] = strategy.reduce_boolean_decision(True)
        mine["all but one"] = strategy.reduce_boolean_decision(dist.get_rank() != 1)
        mine["one"] = strategy.reduce_boolean_decision(dist.get_rank() == 3, all=False)
        mine["none"] = strategy.reduce_boolean_decision(False, all=False)

    module.on_train_start = ask
    trainer = make_trainer(strategy, 4, limit_train_batches=1)
    trainer.fit(module, module.loader(dist.get_rank() // 2, 2))
    return mine


def test_ranks_agree(worlds: Worlds) -> None:
    for rank, answer in enumerate(worlds(4).run(decisions)):
        other = (rank + 2) % 4  # the same place on tp, other rows
        assert answer == {
            "mean": 1.5,  # one value on all: those at other places on tp have the same rows, and count once
            "sum": 3,
            "gathered": sorted([rank, other]),
            "gathered by the module": sorted([rank, other]),
            # each of the two at this place on tp took (1 + its rank) times what belongs to a place in what it gathered
            "its gradient": [(2 + rank + other) * (1.0 if rank < other else 10.0)],
            "of all": 6,
            "unanimous": True,
            "all but one": False,
            "one": True,
            "none": False,
        }


class OwnSampler(Split):
    """A loader whose rows follow from the rank in the world, which tensor-parallel ranks must not do."""

    def loader(self, rank: int, shards: int) -> DataLoader:
        return super().loader(dist.get_rank(), dist.get_world_size())


def test_ranks_that_should_share_rows_and_do_not(worlds: Worlds) -> None:
    for text, _ in worlds(4).run(failure, OwnSampler, MESH, 4):
        assert text == (
            "ConfigError: ranks 0 and 1 share batch shard 0 but hold different rows in batch leaf '0': only dp_* axes "
            "divide the batch; let the Trainer make the sampler, or give yours "
            "**strategy.distributed_sampler_kwargs and the same seed on every rank"
        )


class Deciding(Split):
    """Decides by a value, so that its Python runs on every rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.weight() if float(loss.detach()) > 0 else loss

    def weight(self) -> float:
        return 1.0


class DecidingByRank(Deciding):
    """Ranks with the same rows weigh them otherwise, by a number that a hook was told, where ranks are processes."""

    def setup(self, stage):
        self.process = self.global_rank

    def weight(self) -> float:
        return 1.0 + self.process % 2


class DecidingByShard(Deciding):
    """As ranks of DDP may: in a step, ranks are the batch's shards."""

    def weight(self) -> float:
        return 1.0 + self.global_rank


@pytest.mark.parametrize(("kind", "told"), [(Deciding, 0), (DecidingByRank, 1), (DecidingByShard, 0)])
def test_copies_of_a_shard_that_come_to_other_losses_are_told(kind: type[Net], told: int, worlds: Worlds) -> None:
    outcomes = worlds(4).run(train, kind, MESH, 4)
    text = "ranks 0 and 1 compute parts of the same rows, but training_step has the loss"
    assert [outcome.said(text) for outcome in outcomes] == [told, 0, 0, 0]


class Seen(Split):
    """Keeps the targets that it was given."""

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.extend(batch[1].tolist())


def rows_of_the_sampler() -> list[int]:
    """The rows that the Trainer's own sampler gave this rank, by number."""
    torch.manual_seed(0)
    module = Seen()
    module.seen = []
    module.net[2] = nn.Linear(8, 16, bias=False)
    strategy = make_strategy(MESH, Split.strategy)
    rows = TensorDataset(torch.randn(16, 6), torch.arange(16))
    make_trainer(strategy, 4, use_distributed_sampler=True).fit(module, DataLoader(rows, batch_size=4, shuffle=True))
    return module.seen


def test_the_trainers_sampler_shares_rows_out_over_the_batch_axis(worlds: Worlds) -> None:
    first, again, second, last = worlds(4).run(rows_of_the_sampler)
    assert first == again
    assert second == last
    assert sorted(first + second) == list(range(16))
