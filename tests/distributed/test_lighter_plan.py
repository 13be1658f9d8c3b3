"""Where memory is short for one kind of block, that one recomputes, and ranks train as one device."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_autoparallel.strategy.planning import plan
from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.slow_memory import SLOW_MEMORY
from tests.support.worlds import Worlds

pytestmark = pytest.mark.matrix
OPTIONS: dict[str, Any] = {"plan": "auto", "hardware": dict(SLOW_MEMORY)}


class Wide(nn.Module):
    """Much to keep for little computing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.sigmoid(torch.tanh(self.up(x)))))


class Heavy(nn.Module):
    """Much computing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 256, bias=False), nn.Linear(256, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x)) / 16


class TwoKinds(Net):
    rows = 512
    steps = 2

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(*(Wide() for _ in range(4)))
        self.heavy = nn.Sequential(*(Heavy() for _ in range(3)))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.heavy(self.wide(x))), y)


def peak_bytes(policy: str) -> float:
    """Predicted of a rank."""
    batch = (torch.zeros(256, 6), torch.zeros(256, dtype=torch.int64))
    module = TwoKinds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = plan(module, batch, MESH, world_size=2, activation_checkpointing=policy, **OPTIONS)
    assert report.training_peak_bytes is not None
    return report.training_peak_bytes


def fit(budget_gib: float) -> Any:
    class Tight(TwoKinds):
        strategy: ClassVar = {**OPTIONS, "activation_checkpointing": "auto", "memory_budget_gib": budget_gib}

        def extra(self) -> Any:
            found = self.trainer.strategy._engine.context.found
            return found.policy, found.answer.notes

    return train(Tight, MESH)


def test_ranks_recompute_one_kind_of_block(worlds: Worlds) -> None:
    """There is room for less than nothing recomputed takes, and for more than the first policy that fits takes."""
    budget_gib = 0.97 * peak_bytes("none") / 2**30
    assert peak_bytes("selective") < 0.8 * budget_gib * 2**30
    outcomes = worlds(2).run(fit, budget_gib)
    policies = {outcome.extra[0] for outcome in outcomes}
    assert len(policies) == 1 and "=" in policies.pop(), [outcome.extra for outcome in outcomes]
    assert_equals_one_device(outcomes, train(TwoKinds, None))
