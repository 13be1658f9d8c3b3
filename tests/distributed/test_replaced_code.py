"""Between epochs and runs a step, a layer's class, or what a class computes is replaced: what was captured of the code
before is not what runs. Two stages of a training are written so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partialmethod
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, make_strategy, make_trainer, train
from tests.support.worlds import Worlds


class Staged(Net):
    """In its second epoch other code runs."""

    epochs = 2
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "compile": False}

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.replace()

    def second(self, batch, batch_idx):
        return self.loss(batch) * 3

    def replace(self) -> None:
        raise NotImplementedError


class Step(Staged):
    def replace(self) -> None:
        self.training_step = self.second


class StepOfClass(Staged):
    """Of a class of its own, which no other training has."""

    def __init__(self) -> None:
        super().__init__()
        self.__class__ = type("Own", (type(self),), {})

    def replace(self) -> None:
        type(self).training_step = Staged.second


class ClassOfModule(Staged):
    def replace(self) -> None:
        self.__class__ = Doubled


class Doubled(ClassOfModule):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 2


class ClassOfLayer(Staged):
    def replace(self) -> None:
        self.net[1].__class__ = nn.Sigmoid


class ClassOfLayerForward(ClassOfLayer):
    strategy: ClassVar[Mapping[str, Any]] = {**ClassOfLayer.strategy, "capture": "forward"}


class ForwardOfLayersClass(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].__class__ = type("Own", (nn.Tanh,), {})

    def replace(self) -> None:
        type(self.net[1]).forward = lambda self, x: x.relu()


@pytest.mark.parametrize("kind", [Step, StepOfClass, ClassOfModule, ClassOfLayer, ForwardOfLayersClass])
def test_what_is_there_now_runs(kind: type[Net], worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, MESH), train(kind, None))


def test_what_is_there_now_runs_in_forward_mode(worlds: Worlds) -> None:
    expected = train(ClassOfLayerForward, None).parameters
    for outcome in worlds(2).run(train, ClassOfLayerForward, MESH):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


class Counts(Net):
    def on_validation_epoch_start(self):
        self.total = torch.zeros(())

    def validation_step(self, batch, batch_idx):
        self.total = self.total + self.loss(batch) * len(batch[0])


class Joins(Callback):
    """The ranks' own totals."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        total = pl_module.total.clone()
        if trainer.world_size > 1:
            dist.all_reduce(total)
        self.found.append(total.item())


class Attaches(Callback):
    """Adds another callback when a run has begun."""

    def __init__(self, joins: Joins) -> None:
        self.joins = joins

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks.append(self.joins)


def joined_in_the_run(mesh: Mapping[str, int] | None) -> list[float]:
    """What a callback finds that was not there when the run was set up."""
    torch.manual_seed(0)
    module, joins = Counts(), Joins()
    strategy = make_strategy(mesh, {"plan": "fsdp", "compile": False}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1, callbacks=[Attaches(joins)])
    trainer.validate(module, module.loader(dist.get_rank(), 2) if mesh else module.loader(0, 1), verbose=False)
    return joins.found


def joined_later(mesh: Mapping[str, int] | None) -> list[float]:
    """What a callback finds that was not there in the run before."""
    torch.manual_seed(0)
    module, joins = Counts(), Joins()
    strategy = make_strategy(mesh, {"plan": "fsdp", "compile": False}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1)
    loader = module.loader(dist.get_rank(), 2) if mesh else module.loader(0, 1)
    trainer.validate(module, loader, verbose=False)
    trainer.callbacks.append(joins)
    trainer.validate(module, loader, verbose=False)
    return joins.found


@pytest.mark.parametrize("joined", [joined_later, joined_in_the_run])
def test_a_callback_that_comes_later_is_given_a_ranks_own(joined: Any, worlds: Worlds) -> None:
    expected = joined(None)
    assert len(expected) == 1
    for found in worlds(2).run(joined, MESH):
        torch.testing.assert_close(found, expected)


def changed_between(mesh: Mapping[str, int] | None) -> tuple[list[Any], str]:
    """Parameters behind trainings in float32, in float64, and with parts frozen: more kinds than one may capture."""
    torch.manual_seed(0)
    module = Narrow()
    strategy = make_strategy(mesh, {"plan": "fsdp", "compile": False, "max_captures": 2}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1)
    loader = module.loader(dist.get_rank(), 2) if mesh else module.loader(0, 1)
    first, last = module.net[0], module.net[2]
    changes = (
        module.float,
        module.double,
        lambda: first.requires_grad_(False),
        lambda: last.bias.requires_grad_(False),
    )
    found = []
    for change in changes:
        change()
        trainer.fit(module, loader)
        trainer.fit_loop.max_epochs += 1
        found.append([parameter.detach().tolist() for parameter in module.parameters()])
    return found, strategy.modes["training_step"] if strategy else "step"


class Partial(Staged):
    """Python makes the step of a class anew whenever it is asked for; nothing is replaced."""

    def either(self, batch, batch_idx, stage):
        return self.loss(batch) * stage

    training_step = partialmethod(either, stage=2.0)

    def replace(self) -> None:
        pass


def test_partial_steps_are_captured_once(worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, Partial, MESH)
    assert_equals_one_device(outcomes, train(Partial, None))
    assert not outcomes[0].said("captured again")


class EndsOnRankZero(Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


class HooksOfOneRank(Staged):
    def replace(self) -> None:
        pass

    def callbacks(self) -> list[Callback]:
        return [EndsOnRankZero()] if dist.is_initialized() and dist.get_rank() == 0 else []


def test_one_rank_may_have_callbacks_of_its_own(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, HooksOfOneRank, MESH), train(HooksOfOneRank, None))


class Narrow(Net):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0].to(self.net[0].weight.dtype), batch[1]))


def test_dtypes_may_change_between_trainings_as_often_as_one_likes(worlds: Worlds) -> None:
    expected, _ = changed_between(None)
    for found, mode in worlds(2).run(changed_between, MESH):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert mode == "step"
