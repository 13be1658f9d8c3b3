"""Lightning's callbacks: the same training, state and records with and without us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from torch import nn

from tests.conformance.saved import MESHES, RULES
from tests.distributed.jobs import Net, Validated, assert_equals_one_device, make_strategy, make_trainer, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Watched(Validated):
    """Validates after each epoch; ``callback`` is looked at afterwards."""

    epochs = 3
    callback: Any

    def make(self) -> Callback:
        raise NotImplementedError

    def callbacks(self):
        self.callback = self.make()
        return [self.callback]


class Stops(Watched):
    """On the loss of validation, which gets worse."""

    epochs = 8

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.5)

    def make(self):
        return EarlyStopping("val", patience=1, min_delta=0.01)

    def extra(self):
        stopped = self.callback
        return self.trainer.global_step, stopped.stopped_epoch, stopped.wait_count, float(stopped.best_score)


class StopsByThreshold(Stops):
    def make(self):
        return EarlyStopping("loss_epoch", stopping_threshold=1.05, check_on_train_epoch_end=True)


class Rates(Watched):
    """Groups with names, momentum and decay, and a scheduler that moves once in each ``interval``."""

    interval, logging = "step", None

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [{"params": parameters[:1], "name": "first"}, {"params": parameters[1:], "lr": 0.01, "name": "rest"}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "name": "rate"}]

    def make(self):
        return LearningRateMonitor(logging_interval=self.logging, log_momentum=True, log_weight_decay=True)

    def extra(self):
        return self.callback.lrs, self.callback.last_momentum_values, self.callback.last_weight_decay_values


class RatesByStep(Rates):
    interval, logging = "epoch", "step"


class RatesByEpoch(Rates):
    logging = "epoch"


class Accumulates(Watched):
    epochs = 4

    def make(self):
        return GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})

    def extra(self):
        return self.trainer.global_step, self.trainer.accumulate_grad_batches


class Timed(Watched):
    def make(self):
        return Timer(duration=timedelta(hours=1))

    def extra(self):
        return self.callback.time_elapsed("train") > 0, self.trainer.global_step


class TimeIsUp(Watched):
    def make(self):
        return Timer(duration=timedelta(seconds=0), interval="step")

    def extra(self):
        return self.trainer.global_step


class Calls(Watched):
    def make(self):
        self.seen: list[Any] = []
        return LambdaCallback(
            on_train_batch_end=lambda trainer, module, outputs, batch, index: self.seen.append(outputs["loss"].item()),
            on_train_epoch_end=lambda trainer, module: self.seen.append(trainer.callback_metrics["loss_epoch"].item()),
        )

    def extra(self):
        return torch.tensor(self.seen)


class Finetunes(Watched):
    """A backbone that is frozen first, and joins the optimizer in the middle."""

    epochs, train_bn = 4, True

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(self.backbone(x)), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def make(self):
        return BackboneFinetuning(2, lambda_func=lambda _: 1.5, backbone_initial_ratio_lr=0.3, train_bn=self.train_bn)

    def extra(self):
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        return rates, [parameter.requires_grad for parameter in self.parameters()]


class FinetunesDdp(Finetunes):
    strategy: ClassVar = {"plan": "ddp"}


class FinetunesFrozenNorm(Finetunes):
    train_bn = False


class Summarized(Watched):
    """Counts, sizes and FLOPs, of shards as of whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
        self.example_input_array = torch.zeros(2, 6)
        self.seen: list[str] = []

    def forward(self, x):
        return self.net(x)

    def make(self):
        seen = self.seen

        class Kept(ModelSummary):
            def on_fit_start(self, trainer, pl_module):
                seen.append(str(self._summary(trainer, pl_module)))

        return Kept(max_depth=3)

    def extra(self):
        return self.seen


DEFAULT = (Stops, RatesByStep, Finetunes)
CASES = [(kind, "2") for kind in (*DEFAULT, StopsByThreshold, Rates, RatesByEpoch, Accumulates, Timed, TimeIsUp, Calls)]
CASES += [(Finetunes, "2x2"), (Stops, "2x2"), (FinetunesDdp, "2"), (FinetunesFrozenNorm, "2")]


@pytest.mark.parametrize(("kind", "mesh"), tiered(CASES, lambda case: case[0] in DEFAULT[:2] and case[1] == "2"))
def test_callbacks_do_what_they_do_on_one_device(kind: type[Watched], mesh: str, worlds: Worlds) -> None:
    expected = train(kind, None)
    size = {"1": 1, "2": 2}.get(mesh, 4)
    outcomes = worlds(size).run(train, kind, MESHES[mesh], size)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra, rtol=1e-5, atol=1e-6)
    if kind is Finetunes:
        assert outcomes[0].said("training_step is captured again for other modes of modules, or other frozen") == 1


@pytest.mark.parametrize("mesh", tiered(["1", "2", "2x2"], "2".__eq__))
def test_summaries_count_whole_parameters(mesh: str, worlds: Worlds) -> None:
    expected = train(Summarized, None).extra
    size = {"1": 1, "2": 2}.get(mesh, 4)
    for outcome in worlds(size).run(train, Summarized, MESHES[mesh], size):
        assert outcome.extra == expected


class Throughput(Watched):
    """What rank 0's rows are multiplied by."""

    flops_per_batch = 1000

    def make(self):
        return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].numel())

    def extra(self):
        counts = self.callback._throughputs["train"]
        samples, batches = list(counts._samples), list(counts._batches)
        return (counts.world_size, samples[-1] * counts.world_size, batches[-1]) if samples else None


class ThroughputTp(Throughput):
    strategy: ClassVar = {"plan": {"base": "fsdp", "rules": RULES}}


@pytest.mark.parametrize(
    ("kind", "mesh"), tiered([(Throughput, "2"), (ThroughputTp, "tp")], lambda case: case[1] == "tp")
)
def test_throughput_counts_every_row_once(kind: type[Throughput], mesh: str, worlds: Worlds) -> None:
    _, samples, batches = train(kind, None).extra
    first = worlds(2).run(train, kind, MESHES[mesh], 2)[0]
    assert first.extra == ({"2": 2, "tp": 1}[mesh], samples, batches)


class Spikes(Net):
    """In its third batch the loss is far from what it was."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.rises(batch_idx)

    def rises(self, batch_idx):
        return 1 + 100 * (batch_idx == 2)


class SpikesOnOneRank(Spikes):
    """In forward mode one rank alone may see it: all end."""

    strategy: ClassVar = {"capture": "forward"}

    def rises(self, batch_idx):
        is_last = getattr(self.trainer.strategy, "global_rank", 0) == self.trainer.world_size - 1
        return 1 + 100 * (batch_idx == 2 and is_last)


def spiked(kind: type[Spikes], mesh: Mapping[str, int] | None, path: str) -> tuple[str, str]:
    """What is raised, and what is to be left out next time."""
    torch.manual_seed(0)
    module, ranks = kind(), math.prod(mesh.values()) if mesh else 1
    callback = SpikeDetection(warmup=1, rtol=0.5, exclude_batches_path=path)
    trainer = make_trainer(make_strategy(mesh, kind.strategy) if mesh else None, ranks, callbacks=[callback])
    shard = (trainer.global_rank, ranks) if mesh else (0, 1)
    try:
        trainer.fit(module, module.loader(*shard))
    except TrainingSpikeException as error:
        trainer.strategy.barrier()
        return str(error), Path(path).read_text()
    return "", ""


@pytest.mark.parametrize("kind", tiered([Spikes, SpikesOnOneRank], lambda kind: kind is SpikesOnOneRank))
def test_spikes_end_the_training_of_all_ranks(kind: type[Spikes], worlds: Worlds, tmp_path: Path) -> None:
    expected = spiked(kind, None, str(tmp_path / "alone.json"))
    assert expected[0]
    assert worlds(2).run(spiked, kind, MESHES["2"], str(tmp_path / "ours.json")) == [expected] * 2
