"""Steps that run their own Python: ranks that part ways stop together, those that may differ train as under DDP."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.errors import ConfigError
from tests.distributed.jobs import MESH, Losses, MemoryLogger, Net, Outcome, failure, make_trainer, train
from tests.numerics.training import full
from tests.support.worlds import Worlds

SECONDS = 60  # generous: a hang would last until the collectives' timeout, 30 minutes


class Forward(Net):
    strategy: ClassVar = {"capture": "forward"}


class FailsOnOneRank(Forward):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            raise KeyError("only here")
        return self.loss(batch)


class FailsBehindItsCalls(Forward):
    """Other ranks are at the end of the step, and have nothing to say of writes."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 1 and dist.get_rank() == 1:
            raise KeyError("only here")
        return loss


class SkipsOnOneRank(Forward):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            return None
        return self.loss(batch)


class FreezesOnOneRank(Forward):
    def on_train_start(self):
        self.net[0].weight.requires_grad_(dist.get_rank() == 0)


def any_failure(kind: type[Net]) -> str:
    """What fitting raises, the user's own error included."""
    try:
        train(kind, MESH)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FailsOnOneRank, "KeyError: 'only here'"),
        (FailsBehindItsCalls, "KeyError: 'only here'"),
        (SkipsOnOneRank, "rank 1 at 'the end of training_step, skipping the batch'"),
        (FreezesOnOneRank, "training_step:net: rank 1 froze other parameters than rank 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_part_ways_stop_together(kind, message, worlds: Worlds) -> None:
    for text in worlds(2).run(any_failure, kind, timeout_s=SECONDS):
        assert message in text


class Various(Net):
    """Batches of other lengths on each rank, a value that is read, parameters and a norm of the step's own."""

    strategy: ClassVar = {"capture": "auto"}
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def loader(self, rank, shards):
        rows = [tuple(leaf[: len(leaf) - rank * (i % 2)] for leaf in batch) for i, batch in enumerate(self.batches())]
        return DataLoader(rows, batch_size=None)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.norm(self.net(x)) * self.scale, y)
        self.log("loss", loss.item())
        return loss if loss > 0.5 else loss * 2


def under_ddp(kind: type[Net]) -> Outcome:
    """The same training under Lightning's DDPStrategy."""
    torch.manual_seed(0)
    module, losses, logger = kind(), Losses(), MemoryLogger()
    trainer = make_trainer(DDPStrategy(), 2, logger=logger, callbacks=[losses], max_epochs=kind.epochs)
    module.train_dataloader = lambda: module.loader(int(os.environ["RANK"]), 2)
    trainer.fit(module)
    return Outcome(
        losses=losses.values,
        logged=logger.rows,
        metrics={},
        parameters={name: full(parameter) for name, parameter in module.named_parameters()},
        warnings=[],
    )


def test_a_step_of_any_kind_trains_as_under_ddp(worlds: Worlds) -> None:
    found, expected = worlds(2).run(train, Various, MESH), worlds(2).run(under_ddp, Various)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.logged, theirs.logged, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.parameters, theirs.parameters)
    (said,) = [text for text in found[0].warnings if "runs in forward mode" in text]
    assert "test_forward.py" in said


class Uncaptured(Net):
    """Nothing is captured, so that no captured call comes between two steps."""

    strategy: ClassVar = {"capture": {"forward": []}}
    epochs = 2


def test_what_was_gathered_for_one_step_is_not_used_in_the_next(worlds: Worlds) -> None:
    found, expected = worlds(2).run(train, Uncaptured, MESH), worlds(2).run(under_ddp, Uncaptured)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.parameters, theirs.parameters)


def test_what_capture_may_be() -> None:
    for wrong in ("steps", {"step": ["net"]}, {"forward": "net"}):
        with pytest.raises(ConfigError, match="capture"):
            AutoParallelStrategy(capture=wrong)


class NamesNothing(Net):
    strategy: ClassVar = {"capture": {"forward": ["nett"]}}


def test_a_name_that_is_no_module(worlds: Worlds) -> None:
    (text, _) = worlds(1).run(failure, NamesNothing, {"dp_shard": 1}, 1)[0]
    assert text == "ConfigError: capture names 'nett', which is no submodule; did you mean 'net'?"


class TwoKinds(Forward):
    """Blocks of two kinds, each in a call of its own."""

    strategy: ClassVar = {"capture": "forward", "activation_checkpointing": "first.*=full, second.*=selective"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))) for _ in range(2)
        )

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(self.second(self.first(x) * 2)), y)


class OneKindMissing(TwoKinds):
    strategy: ClassVar = {"capture": "step", "activation_checkpointing": "first.*=full, third.*=selective"}


def test_a_call_need_not_hold_every_kind_of_block_that_a_policy_names(worlds: Worlds) -> None:
    """A whole step must: there the pattern is a mistake."""
    alone = train(TwoKinds, None)
    for kind, expected in ((TwoKinds, 0), (OneKindMissing, 1)):
        outcomes = worlds(2).run(train, kind, MESH)
        told = [text for outcome in outcomes for text in outcome.warnings if "has no effect" in text]
        assert len(told) == expected and all("third.*=selective" in text for text in told)
        losses = torch.tensor([outcome.losses for outcome in outcomes]).mean(0)
        assert losses.tolist() == pytest.approx(alone.losses, rel=1e-5)
