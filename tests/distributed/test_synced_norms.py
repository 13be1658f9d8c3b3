"""`Trainer(sync_batchnorm=True)`: batch norms take the rows of all ranks, however a step runs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.jobs import MESH, ByHand, Net, failure, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

SYNCED = {"sync_batchnorm": True}
SHARDS_AND_TP = {"dp_shard": 2, "tp": 2}


class Whole(Net):
    """Captured whole, it has the statistics of the global batch anyway."""

    epochs = 2
    mode = "step"
    trainer_options: ClassVar = SYNCED

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), self.norm(), nn.Tanh(), nn.Linear(10, 3))

    def norm(self) -> nn.Module:
        return nn.BatchNorm1d(10)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def extra(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.named_buffers()}


class Reads(Whole):
    mode = "forward"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = loss.item()
        return loss


class Manual(ByHand, Whole):
    mode = "forward"


class ByPlugin(Manual):
    trainer_options: ClassVar = {"plugins": [TorchSyncBatchNorm()]}


class Named(Manual):
    mode = "forward, as asked"
    strategy: ClassVar = {"capture": {"forward": ["net"]}}


class NoneNamed(Manual):
    mode = "forward, as asked"
    strategy: ClassVar = {"capture": {"forward": []}, "plan": "ddp"}


class Average(Reads):
    """A plain average of the statistics, and none that trains."""

    def norm(self) -> nn.Module:
        return nn.BatchNorm1d(10, momentum=None, affine=False)


class Untracked(Reads):
    def norm(self) -> nn.Module:
        return nn.BatchNorm1d(10, track_running_stats=False)


class Frozen(Reads):
    """What the norm reads has no gradient, nor has its weight."""

    def norm(self) -> nn.Module:
        norm = nn.BatchNorm1d(10)
        norm.weight.requires_grad_(False)
        return norm

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Activated(nn.BatchNorm1d):
    """As libraries derive theirs, with a forward of its own."""

    def forward(self, x):
        out = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.gelu(out)


class Derived(Manual):
    def norm(self) -> nn.Module:
        return Activated(10)


class Pixels(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
        )


class Uneven(Manual):
    """Three rows on one rank and five on the other: statistics are those of all eight."""

    def loader(self, rank: int, shards: int) -> DataLoader:
        rows = slice(None) if shards == 1 else (slice(0, 3), slice(3, 8))[rank]
        return DataLoader([tuple(tensor[rows] for tensor in batch) for batch in self.batches()], batch_size=None)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        shards = dist.get_world_size() if dist.is_initialized() else 1  # of whose losses the mean is taken
        return F.cross_entropy(self.net(x), y, reduction="sum") * shards / 8


class Double(Reads):
    trainer_options: ClassVar = {**SYNCED, "precision": "64-true"}


class Accumulated(Reads):
    trainer_options: ClassVar = {**SYNCED, "accumulate_grad_batches": 2}


class Mixed(Reads):
    trainer_options: ClassVar = {**SYNCED, "precision": "bf16-mixed"}


class Half(Reads):
    trainer_options: ClassVar = {**SYNCED, "precision": "bf16-true"}


KINDS = [
    *(Whole, Reads, Manual, ByPlugin, Named, NoneNamed, Average, Untracked, Frozen, Derived, Pixels, Uneven, Double),
    *(Accumulated, Mixed, Half),
]


@pytest.mark.parametrize("kind", tiered(KINDS, (Whole, Manual, Average, Derived, Uneven).__contains__))
def test_statistics_are_those_of_all_rows(kind: type[Whole], worlds: Worlds) -> None:
    assert_as_one_device(kind, worlds(2).run(train, kind, MESH))


@pytest.mark.matrix
def test_ranks_that_share_rows_count_them_once(worlds: Worlds) -> None:
    assert_as_one_device(Manual, worlds(4).run(train, Manual, SHARDS_AND_TP, 4))


def assert_as_one_device(kind: type[Whole], outcomes: list[Any]) -> None:
    expected = train(kind, None)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind not in (Mixed, Half) else {"rtol": 3e-2, "atol": 2e-2}
    for rank, outcome in enumerate(outcomes):
        torch.testing.assert_close(outcome.parameters, expected.parameters, **tolerance)
        torch.testing.assert_close(outcome.extra, expected.extra, **tolerance)
        if kind is not Uneven:
            torch.testing.assert_close(outcome.metrics["val"], expected.metrics["val"], **tolerance)
        assert outcome.said("training_step runs in forward mode") == (rank == 0 and kind.mode == "forward")


class LeftOut(Reads):
    """One rank's loss does not depend on the norm that both have called."""

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        if self.global_rank == 1 and float(scores.sum()) < float("inf"):
            return self.net[0](batch[0]).square().mean()
        return F.cross_entropy(scores, batch[1])


class CalledByOne(Reads):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch[0])
        if float(hidden.sum()) < float("inf") and self.global_rank == 1:
            return hidden.square().mean()
        return F.cross_entropy(self.net[2:](self.net[1](hidden)), batch[1])


class Wider(TorchSyncBatchNorm):
    """A plugin of the user's own."""


class OwnPlugin(Manual):
    trainer_options: ClassVar = {"plugins": [Wider()]}


def test_ranks_that_leave_a_norm_out_are_told(worlds: Worlds) -> None:
    for message, seconds in worlds(2).run(failure, LeftOut):
        assert "OtherRankError" in message
        assert "module 'net.1' (BatchNorm1d)" in message
        assert seconds < 60
    for message, seconds in worlds(2).run(failure, CalledByOne):
        assert "OtherRankError: ranks have come to different places of a step" in message
        assert "module 'net.1' (BatchNorm1d)" in message
        assert seconds < 60


def test_a_plugin_that_replaces_layers_is_refused(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, OwnPlugin):
        assert message.startswith("ConfigError: Wider puts layers of its own into the module")
        assert "sync_batchnorm=True" in message
