"""Rules are for the training step: what comes later and cannot compute with their cuts is no end of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.jobs import (
    Net,
    Validated,
    assert_equals_one_device,
    failure,
    make_strategy,
    make_trainer,
    train,
)
from tests.support.worlds import Worlds

TP = {"tp": 2}
COLUMNS, ROWS = {"tp": "S(0)"}, {"tp": "S(1)"}
RULES = {"net.0.*": COLUMNS, "net.1.*": COLUMNS, "net.3.weight": ROWS}


class Normed(Validated):
    """A batch norm between the two cut layers, cut as they are, which validations evaluate."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": {"base": "fsdp", "rules": RULES}, "capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))

    def sums(self) -> Tensor:
        """Sums down the columns of the weight, which nobody can make of its rows alone."""
        return self.net[0].weight.cumsum(0).pow(2).mean()


class LooksAtSums(Normed):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("sums", self.sums())


class LearnsSumsLater(Normed):
    """A term of the loss from the second epoch on."""

    epochs = 2

    def loss(self, batch: Any) -> Tensor:
        later = self.training and self.current_epoch
        return super().loss(batch) + (0.1 * self.sums() if later else 0.0)


class LearnsSums(Normed):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.sums()


@pytest.mark.parametrize(
    ("kind", "step"), [(Normed, None), (LooksAtSums, "validation_step"), (LearnsSumsLater, "training_step")]
)
def test_it_computes_with_whole_parameters_and_says_so(kind: type[Net], step: str | None, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, kind, TP)

    assert_equals_one_device(outcomes, train(kind, None))
    told = [said for said in outcomes[0].warnings if "computes with whole parameters" in said]
    assert len(told) == (step is not None)
    assert all(said.startswith(f"plan fsdp with 3 rules: {step}") and "aten.cumsum.default" in said for said in told)


def test_rules_that_do_not_fit_the_training_step_are_told_before_it(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, LearnsSums, TP):
        assert message.startswith("InfeasiblePlanError: aten.cumsum.default in the step itself")


class TiedLater(Normed):
    """A hook ties two weights, each of which a rule names."""

    epochs = 2
    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"base": "fsdp", "rules": {"net.0.weight": ROWS, "net.2.weight": ROWS}},
        "capture": "step",
    }

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))

    def on_train_epoch_start(self):
        if self.current_epoch:
            self.net[2].weight = self.net[0].weight


class LastRuleTied(TiedLater):
    """No other rule names the axis."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"base": "fsdp", "rules": {"net.2.weight": ROWS}},
        "capture": "step",
    }


def fitted_twice(kind: type[Net]) -> int:
    """The epochs that a second fit comes to, of a module whose weights the first has tied."""
    torch.manual_seed(0)
    module = kind()
    trainer = make_trainer(make_strategy(TP, kind.strategy), 2, max_epochs=2)
    trainer.fit(module, module.loader(0, 1))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, module.loader(0, 1))
    return trainer.current_epoch


@pytest.mark.parametrize("kind", [TiedLater, LastRuleTied])
def test_a_rule_of_a_weight_that_is_tied_to_another_has_no_say(kind: type[Net], worlds: Worlds) -> None:
    outcomes = worlds(2).run(train, kind, TP)

    assert_equals_one_device(outcomes, train(kind, None))
    (told,) = [said for said in outcomes[0].warnings if "'net.2.weight'" in said]
    assert "matches no parameter any more" in told


def test_tied_weights_are_fitted_again(worlds: Worlds) -> None:
    assert worlds(2).run(fitted_twice, TiedLater) == [3, 3]


class Sequences(Validated):
    """A rule cuts what a module gives along the sequence, whose length changes."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"base": "fsdp", "rules": {"outputs:net.0": {"tp": "S(1)"}}},
        "capture": "step",
    }
    lengths = (8, 8, 7, 8)

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [
            (torch.randn(8, length, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
            for length in self.lengths
        ]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).mean(1), batch[1])


class CalledSequences(Sequences):
    strategy: ClassVar[Mapping[str, Any]] = {**Sequences.strategy, "capture": "forward"}


class OddFromTheStart(Sequences):
    lengths = (7, 8, 8, 8)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (Sequences, ["training_step", "validation_step"]),
        (CalledSequences, ["training_step:net", "validation_step:net:inference"]),
    ],
)
def test_a_later_value_that_a_rule_cannot_cut_is_left_to_the_planner(
    kind: type[Net], steps: list[str], worlds: Worlds
) -> None:
    outcomes = worlds(2).run(train, kind, TP)

    assert_equals_one_device(outcomes, train(kind, None))
    told = [said for said in outcomes[0].warnings if "has values that no rule pins" in said]
    assert [said.split()[5] for said in told] == steps
    assert all("rule 'outputs:net.0' shares dim 1 of 'net.0', 7 long" in said for said in told)


def test_a_value_of_the_first_training_step_that_a_rule_cannot_cut_is_told_before_it(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, OddFromTheStart, TP):
        assert message.startswith("ConfigError: rule 'outputs:net.0' shares dim 1 of 'net.0', 7 long")
