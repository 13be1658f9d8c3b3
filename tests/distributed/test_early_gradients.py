"""Gradients are gone before a forward that nobody could see them in, and are there where somebody can."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback

from lightning_autoparallel import AutoParallelStrategy
from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds

LAST = "the last step's gradients"


class Plain(Net):
    """Four batches, each a step; says behind which forwards a gradient was there, and what was predicted."""

    kept = (False,) * 4
    predicted = False

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def extra(self) -> Any:
        report = getattr(self.trainer.strategy, "reports", {}).get("training_step")
        at_peak = report.predictions["forward"].at_peak if report is not None else ()
        return tuple(self.found), any(share.name == LAST for share in at_peak)


class Scheduled(Plain):
    """Two micro-batches add up from the first epoch on."""

    kept = (False, True) * 2
    predicted = True

    def callbacks(self) -> list[Callback]:
        return [GradientAccumulationScheduler({0: 2})]


class Accumulates(Plain):
    kept = (False, True) * 2
    predicted = True
    trainer_options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}


class HasCallback(Plain):
    kept = (False, True, True, True)
    predicted = True

    def callbacks(self) -> list[Callback]:
        return [LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: None)]


class HasHook(Plain):
    kept = (False, True, True, True)
    predicted = True

    def on_before_zero_grad(self, optimizer):
        """Looks at what is about to be cleared."""


class ClearsByItself(Plain):
    """Every second step adds to the gradients of the first."""

    kept = (False, True, True, True)
    predicted = True

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
    predicted = True

    def configure_optimizers(self):
        return Halving(self.parameters(), lr=0.1)


class Forward(Plain):
    """Its Python runs at every step, and could look."""

    kept = (False, True, True, True)
    strategy: ClassVar[dict[str, Any]] = {"capture": "forward"}

    def extra(self) -> Any:
        return tuple(self.found), False


def trained(kind: type[Plain], mesh: Any = None) -> Any:
    """A training that notes what lies in a parameter between its forward and its backward."""

    def note(strategy: AutoParallelStrategy) -> None:
        module = strategy.lightning_module
        assert isinstance(module, Plain)
        module.found.append(module.net[2].bias.grad is not None)

    with mock.patch.object(AutoParallelStrategy, "post_training_step", note):
        return train(kind, mesh)


KINDS = [Plain, Accumulates, Scheduled, HasCallback, HasHook, ClearsByItself, OwnOptimizer, Forward]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_gradients_are_kept_where_they_could_be_seen(kind: type[Plain], worlds: Worlds):
    outcomes = worlds(2).run(trained, kind, MESH)
    assert [outcome.extra for outcome in outcomes] == [(kind.kept, kind.predicted)] * 2
    expected = train(kind, None).parameters
    for outcome in outcomes:
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)
