"""Steps that run while ranks agree on them: one message each, and nothing comes of a step on which they do not."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.ready_step import ReadyStep
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
from tests.distributed.test_agreement import KINDS, RANKS
from tests.numerics.training import full
from tests.support.worlds import Worlds

SECONDS = 120  # a group's timeout is far longer


def answers_ahead(kind: str) -> tuple[list[Any], int]:
    """What a rank is told that begins three times, the second time with rank 2 elsewhere; how often it has joined."""
    control, joined = KINDS[kind](timedelta(seconds=60)), []
    control.join = lambda: joined.append(dist.barrier() or dist.get_rank())
    told: list[Any] = [control.begin("same")()]
    if dist.get_rank() == 2:
        told.append(control.agrees("elsewhere"))
    else:
        answer = control.begin("same")
        dist.barrier()  # a collective of the step
        told.append(answer())
    told += [control.begin(f"rank {dist.get_rank()}")(), control.agrees("same"), control.any([dist.get_rank() == 1])]
    return told, len(joined)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_elsewhere_joins_those_that_run_ahead(kind: str, worlds: Worlds) -> None:
    for rank, (told, joined) in enumerate(worlds(RANKS).run(answers_ahead, kind, timeout_s=SECONDS)):
        assert (told, joined) == ([True, False, False, True, [True]], int(rank == 2))


class Sharded(Net):
    """Its forward gathers parameters."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}


def fit_alone(module: Net, strategy: Mapping[str, Any]) -> Trainer:
    """Fit without callbacks: no code of the user's runs between steps."""
    chosen = make_strategy(MESH, strategy)
    module.train_dataloader = lambda: module.loader(chosen.mesh.data_parallel_rank, 2)
    trainer = make_trainer(chosen, 2)
    trainer.fit(module)
    return trainer


def messages_of_steps(kind: type[Net]) -> list[str]:
    """What is sent of each training step but the first, in order: what waits for its answer, and what does not."""
    sent: list[str] = []
    most, begin, run = ControlGroup._most, ControlGroup.begin, ReadyStep.run

    def waits(self: ControlGroup, *args: Any, **kwargs: Any) -> Any:
        sent.append("waits")
        return most(self, *args, **kwargs)

    def begins(self: ControlGroup, text: str) -> Any:
        sent.append("begins")
        return begin(self, text)

    def runs(self: ReadyStep, *args: Any) -> Any:
        result = run(self, *args)
        sent.append("has run")
        return result

    with (
        mock.patch.object(ControlGroup, "_most", waits),
        mock.patch.object(ControlGroup, "begin", begins),
        mock.patch.object(ReadyStep, "run", runs),
    ):
        fit_alone(kind(), kind.strategy)
    ends = [i for i, what in enumerate(sent) if what == "has run"]
    return sent[ends[0] + 1 : ends[-1] + 1]


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_step_sends_one_message_and_waits_for_none(plan: str, worlds: Worlds) -> None:
    kind = {"ddp": Net, "fsdp": Sharded}[plan]
    assert worlds(2).run(messages_of_steps, kind, timeout_s=SECONDS) == [["begins", "has run"] * 3] * 2


class StopsInLoader(Sharded):
    """A signal comes while rank 1 reads its third batch."""

    steps = 6

    def loader(self, rank, shards):
        batches = list(super().loader(rank, shards))

        def read() -> Iterator[Any]:
            for i, batch in enumerate(batches):
                if (i, rank) == (2, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return DataLoader(Rows(read), batch_size=None)


class Rows(IterableDataset):
    def __init__(self, read: Any) -> None:
        self.read = read

    def __iter__(self):
        return self.read()


def end_without_hooks() -> tuple[str, int]:
    """How the training ends, and how many batches it had."""
    module = StopsInLoader()
    try:
        fit_alone(module, module.strategy)
    except BaseException as error:
        return type(error).__name__, module.trainer.global_step
    return "trained on", module.trainer.global_step


def test_a_signal_in_the_message_of_a_step_ends_all_behind_it(worlds: Worlds) -> None:
    first, second = worlds(2).run(end_without_hooks, timeout_s=SECONDS)
    assert first == second
    assert first[0] == "SIGTERMException"
    assert first[1] in (3, 4)  # a loader without a length is read one batch ahead


def parameters_without_hooks(kind: type[Net]) -> dict[str, torch.Tensor]:
    """What a training without callbacks comes to."""
    torch.manual_seed(0)
    module = kind()
    fit_alone(module, kind.strategy)
    return {name: full(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_differ_where_nothing_runs_between_steps(compiled: bool, worlds: Worlds) -> None:
    kind = UnevenThirdCompiled if compiled else UnevenThird
    expected = train(MeansOfRanks, None).parameters
    for parameters in worlds(2).run(parameters_without_hooks, kind, timeout_s=SECONDS):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


class Whole(Net):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "step"}


class UnevenThird(Sharded):
    """Rank 1 has a row less in the third batch."""

    def loader(self, rank, shards):
        own = list(super().loader(rank, shards))
        if rank == 1:
            own[2] = tuple(leaf[:-1] for leaf in own[2])
        return DataLoader(own, batch_size=None)


class UnevenThirdCompiled(UnevenThird):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "compile": True}


class MeansOfRanks(Net):
    """The same on one device, as DDP would have it: the mean of what ranks have for a loss."""

    def loader(self, rank, shards):
        parts = [[(x.chunk(2)[i], y.chunk(2)[i]) for i in range(2)] for x, y in self.batches()]
        parts[2][1] = tuple(leaf[:-1] for leaf in parts[2][1])
        return DataLoader(parts, batch_size=None)

    def loss(self, batch):
        return torch.stack([F.cross_entropy(self.net(x), y) for x, y in batch]).mean()


@pytest.mark.parametrize("kind", [UnevenThird, UnevenThirdCompiled])
def test_nothing_comes_of_a_step_on_which_ranks_differ(kind: type[Net], worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, kind, MESH, timeout_s=SECONDS)
    assert outcomes[0].said("ranks hold different batches") == 1
    expected = train(MeansOfRanks, None)
    for outcome in outcomes:
        assert len(outcome.losses) == 4
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)


class GrowsAlone(Whole):
    """Rank 1 alone registers a buffer more behind the second batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.register_buffer("more", torch.ones(()))


class SkipsThird(Whole):
    """A hook of rank 1 alone skips the third batch, which ends its epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 and self.global_rank == 1 else None


class ScalesThird(Whole):
    """Rank 1 alone changes a buffer that the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch):
        return super().loss(batch) * self.scale

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            self.scale.mul_(2)


class Ahead(Net):
    """Logs, and normalises over all rows: what a step leaves behind beside gradients."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def extra(self) -> Any:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def test_what_steps_leave_behind_is_that_of_one_device(worlds: Worlds) -> None:
    outcomes, expected = worlds(2).run(train, Ahead, MESH, timeout_s=SECONDS), train(Ahead, None)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra, rtol=1e-5, atol=1e-6)


def end_after_signals(ranks: tuple[int, ...]) -> tuple[str, int]:
    """How a training ends of which these ranks are told to end behind the second batch; how many batches it had."""

    class Told(Sharded):
        seen = 0

        def on_train_batch_end(self, outputs, batch, batch_idx):
            Told.seen += 1
            if batch_idx == 1 and self.global_rank in ranks:
                os.kill(os.getpid(), signal.SIGTERM)

    module = Told()
    module.train_dataloader = lambda: module.loader(module.global_rank, 2)
    trainer = make_trainer(make_strategy(MESH, Sharded.strategy), 2, max_epochs=3)
    try:
        trainer.fit(module)
    except BaseException as error:
        return type(error).__name__, Told.seen
    return "trained on", Told.seen


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_all_end_in_the_batch_that_tells_them(ranks: tuple[int, ...], worlds: Worlds) -> None:
    assert worlds(2).run(end_after_signals, ranks, timeout_s=SECONDS) == [("SIGTERMException", 2)] * 2


class RepeatsAlone(Whole):
    """Its optimizer asks for one more gradient, of another batch on each rank: equal steps, at different places."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx == 1 + self.global_rank:
            optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class StopsAloneBeforeHooks(Sharded):
    """What the user's hook sends in front of a step comes after ranks have met."""

    def on_train_batch_start(self, batch, batch_idx):
        self.all_gather(torch.tensor(1.0))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.trainer.should_stop = True


class StopsAloneInForwardMode(Validated):
    """Validations are captured whole, and training steps are not."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    trainer_options: ClassVar[Mapping[str, Any]] = {"num_sanity_val_steps": 1}
    at = 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == self.at and self.global_rank == 1:
            self.trainer.should_stop = True


class StopsAloneLater(StopsAloneInForwardMode):
    at = 2


class StopsBehindForwardMode(Validated):
    """Rank 0 alone stops behind a validation in forward mode, for which buffers are sent."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    epochs = 3

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))

    def validation_step(self, batch, batch_idx):
        assert float(self.loss(batch)) < 1e9

    def on_validation_end(self):
        if self.global_rank == 0 and self.current_epoch == 1:
            self.trainer.should_stop = True


class StopsBeforeOwnOptimizer(Sharded):
    """What sends in front of the closure comes after ranks have met, too."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.all_gather(torch.tensor(1.0))
        optimizer.step(closure=optimizer_closure)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (GrowsAlone, "rank 1 froze other parameters than rank 0, or has modules in another mode"),
        (StopsBehindForwardMode, "come to different places"),
        (StopsBeforeOwnOptimizer, "come to different places"),
        (SkipsThird, "come to different places"),
        (ScalesThird, "buffer scale, which the step reads, was changed"),
        (RepeatsAlone, "come to different places"),
        (StopsAloneBeforeHooks, "come to different places"),
        (StopsAloneInForwardMode, "come to different places"),
        (StopsAloneLater, "come to different places"),
    ],
)
def test_differences_of_a_step_that_ran_ahead_are_said(kind: type[Net], said: str, worlds: Worlds) -> None:
    for text, seconds in worlds(2).run(failure, kind, timeout_s=SECONDS):
        assert said in text
        assert seconds < SECONDS


class Picky(UnevenThird):
    """Operators that refuse most values: a step is run again, for others, on what it has run on."""

    def batches(self):
        return [(x, y + 1) for x, y in super().batches()]

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x + 0 * torch.multinomial(x.abs(), 1)), y - 1)


def test_a_step_that_looks_at_values_can_be_joined(worlds: Worlds) -> None:
    for outcome in worlds(2).run(train, Picky, MESH, timeout_s=SECONDS):
        assert len(outcome.losses) == 4


class StartsOnRank0(Sharded):
    """Rank 0 alone has a callback that runs before a step."""

    def callbacks(self):
        return [Starts()] if dist.get_rank() == 0 else []


class Starts(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pass


def test_ranks_may_have_other_callbacks(worlds: Worlds) -> None:
    for outcome in worlds(2).run(train, StartsOnRank0, MESH, timeout_s=SECONDS):
        assert len(outcome.losses) == 4


class Counted(UnevenThird):
    """Keeps what the third step launched."""

    launched: Mapping[str, int] | None = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.launched = dict(self.trainer.strategy.measured_launches)

    def extra(self) -> Any:
        return self.launched


def test_a_forward_that_came_to_nothing_is_not_counted(worlds: Worlds) -> None:
    ahead, joined = worlds(2).run(train, Counted, MESH, timeout_s=SECONDS)
    assert ahead.extra == joined.extra


def shards_of_the_fit_before() -> list[int]:
    """How many parameters of a first fit are there at each batch of a second one."""
    module, strategy = Sharded(), make_strategy(MESH, Sharded.strategy)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    trainer = make_trainer(strategy, 2)
    before: list[weakref.ref[nn.Parameter]] = []
    module.on_train_end = lambda: before.extend(map(weakref.ref, module.parameters()))
    trainer.fit(module)
    first, alive = list(before), []

    def look(outputs: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()
        alive.append(sum(parameter() is not None for parameter in first))

    module.on_train_batch_end = look
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return alive


def test_a_second_fit_holds_nothing_of_the_first(worlds: Worlds) -> None:
    assert worlds(2).run(shards_of_the_fit_before, timeout_s=SECONDS) == [[0, 0, 0, 0]] * 2
