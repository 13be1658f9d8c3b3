"""Gradients are gone before a forward that nobody could see them in, and are there where somebody can."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging
from torch import nn

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.contracts import CapturedGraph, EarlierGradients
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.strategy.planning import planning_trainer, run_planning
from tests.distributed.jobs import MESH, Net, failure, train
from tests.support.worlds import Worlds

LAST, EARLIER = "the last step's gradients", "earlier micro-batches' gradients"


class Plain(Net):
    """Four batches, each a step; says behind which forwards a gradient was there, and what was predicted."""

    kept = (False,) * 4
    predicted: tuple[str | None, str | None] = (None, None)  # beside the forward and the backward
    told = False

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def extra(self) -> Any:
        report = getattr(self.trainer.strategy, "reports", {}).get("training_step")
        halves = () if report is None else (report.predictions["forward"], report.predictions["backward"])
        beside = [{share.name for share in half.at_peak} & {LAST, EARLIER} for half in halves]
        return tuple(self.found), tuple(names.pop() if names else None for names in beside)


class Scheduled(Plain):
    """Two micro-batches add up from the first epoch on."""

    kept = (False, True) * 2
    predicted = (EARLIER, EARLIER)

    def callbacks(self) -> list[Callback]:
        return [GradientAccumulationScheduler({0: 2})]


class Accumulates(Plain):
    kept = (False, True) * 2
    predicted = (EARLIER, EARLIER)
    trainer_options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}


class HasCallback(Plain):
    kept = (False, True, True, True)
    predicted = (LAST, None)

    def callbacks(self) -> list[Callback]:
        return [LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: None)]


class HasHook(Plain):
    kept = (False, True, True, True)
    predicted = (LAST, None)

    def on_before_zero_grad(self, optimizer):
        """Looks at what is about to be cleared."""


class ClearsByItself(Plain):
    """Every second step adds to the gradients of the first."""

    kept = (False, True, True, True)
    predicted = (LAST, None)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Halving(torch.optim.SGD):
    """Keeps half of the gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad = parameter.grad * 0.5


class OwnOptimizer(Plain):
    kept = (False, True, True, True)
    predicted = (LAST, None)

    def configure_optimizers(self):
        return Halving(self.parameters(), lr=0.1)


class Patched(Plain):
    """Its optimizer clears in a way of its own, unlike others of its kind."""

    kept = (False, True, True, True)
    predicted = (LAST, None)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = partial(Halving.zero_grad, optimizer)
        return optimizer


class Wrapper:
    """An optimizer to Lightning, though of no class of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Wrapped(Plain):
    kept = (False, True, True, True)
    predicted = (LAST, None)

    def configure_optimizers(self):
        return Wrapper(super().configure_optimizers())


class OneRankLooks(Plain):
    """A hook of rank 0 alone: all ranks predict alike."""

    kept = (False, True, True, True)
    predicted = (LAST, None)

    def callbacks(self) -> list[Callback]:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return HasCallback.callbacks(self) if is_first else []  # type: ignore[arg-type]


class HeadOnly(Plain):
    """Gradients of what no optimizer holds add up from the first step on."""

    predicted = (LAST, None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class Forward(Plain):
    """Its Python runs at every step, and could look."""

    kept = (False, True, True, True)
    strategy: ClassVar[dict[str, Any]] = {"capture": "forward"}

    def extra(self) -> Any:
        return tuple(self.found), (None, None)


class Averages(Plain):
    """A last epoch renews the statistics of averaged weights: no backward, and nothing is cleared."""

    epochs = 2
    kept = (*[False] * 8, *[True] * 4)

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(nn.BatchNorm1d(10), nn.Tanh())

    def callbacks(self) -> list[Callback]:
        return [StochasticWeightAveraging(0.1, swa_epoch_start=1)]


class _Joins(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.callbacks += HasCallback.callbacks(pl_module)


class LateHook(Plain):
    """Comes when the step was captured without it."""

    kept = (False, False, True, True)
    told = True

    def callbacks(self) -> list[Callback]:
        return [_Joins()]


def trained(kind: type[Plain], mesh: Any = None) -> Any:
    """A training that notes what lies in a parameter between its forward and its backward."""

    def note(strategy: AutoParallelStrategy) -> None:
        module = strategy.lightning_module
        assert isinstance(module, Plain)
        module.found.append(module.net[2].bias.grad is not None)

    with mock.patch.object(AutoParallelStrategy, "post_training_step", note):
        return train(kind, mesh)


KINDS: list[type[Plain]] = [
    *(Plain, Accumulates, Scheduled, HasCallback, HasHook, ClearsByItself, OwnOptimizer, Patched, Wrapped),
    *(OneRankLooks, HeadOnly, Forward, Averages, LateHook),
]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_gradients_are_kept_where_they_could_be_seen(kind: type[Plain], worlds: Worlds):
    outcomes = worlds(2).run(trained, kind, MESH)
    others = (False,) * 4 if kind is OneRankLooks else kind.kept
    found = [outcome.extra for outcome in outcomes]
    assert found == [(kind.kept, kind.predicted), (others, kind.predicted)]
    assert any("one copy of the gradients" in text for text in outcomes[0].warnings) == kind.told
    expected = train(kind, None).parameters
    for outcome in outcomes:
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


class WholeOnly(Plain):
    strategy: ClassVar[dict[str, Any]] = {"capture": "step"}


def cannot_tell_on_rank_1() -> str:
    """The error of a training one of whose ranks cannot say what looks at its gradients."""

    def answer(strategy: AutoParallelStrategy, module: Plain, captured: CapturedGraph) -> EarlierGradients:
        if dist.get_rank() == 1:
            raise ConfigError("rank 1 cannot tell")
        return "freed"

    with mock.patch.object(AutoParallelStrategy, "_earlier_gradients", answer):
        return failure(WholeOnly)[0]


def test_a_rank_that_cannot_tell_ends_all(worlds: Worlds):
    assert all("rank 1 cannot tell" in error for error in worlds(2).run(cannot_tell_on_rank_1))


def test_planning_knows_of_callbacks_that_it_leaves_out():
    peaks = []
    for callbacks in (None, HasCallback.callbacks(Plain()), [GradientAccumulationScheduler({4: 2})]):
        strategy = PlanningStrategy(world_size=2, mesh=dict(MESH), plan="fsdp")
        trainer = planning_trainer(strategy, {"max_epochs": 1, "callbacks": callbacks}, Trainer)
        module = Plain()
        module.train_dataloader = lambda module=module: module.loader(0, 2)
        peaks.append(run_planning(trainer, module, None).predictions["forward"].peak_memory_bytes)
    assert peaks[0] < peaks[1] == peaks[2]
