"""Kinds of blocks recompute as little as fits, each by its own policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.lightning_compat import LightningModule
from lightning_autoparallel.pipeline import found_plan
from lightning_autoparallel.pipeline.recomputed_kinds import MOST_KINDS, _lighter, _most_read, _Option
from lightning_autoparallel.strategy.planning import plan

GIB = 2**30


def option(policy: str, read_bytes: float, again_us: float) -> _Option:
    return _Option(policy=policy, read_bytes=read_bytes, again_us=again_us)


def options_of(*kinds: tuple[float, float]) -> dict[str, list[_Option]]:
    """Each reads so much, or computes so long once more, and half of both under a second policy."""
    return {
        f"k{i}.*": [option("none", read, 0.0), option("selective", read / 2, again / 2), option("full", 0.0, again)]
        for i, (read, again) in enumerate(kinds)
    }


def test_combinations_that_compute_less_the_least_first() -> None:
    """By hand: 50 us are computed once more where all blocks recompute; what is read is no more than there is."""
    options = options_of((100.0, 10.0), (20.0, 40.0))
    found = [tuple(chosen.values()) for chosen in _lighter(options, 30.0, 115.0)]
    assert found == [
        ("selective", "none"),  # 5 us, 70 bytes
        ("full", "none"),  # 10, 20
        ("none", "selective"),  # 20, 110
        ("selective", "selective"),  # 25, 60
        ("full", "selective"),  # 30, 10
    ]
    assert _lighter(options, 4.0, 115.0) == []


def test_of_many_kinds_those_that_read_most() -> None:
    options = options_of(*((float(i), 1.0) for i in range(MOST_KINDS + 3)))
    assert list(_most_read(options)) == [f"k{i}.*" for i in range(MOST_KINDS + 2, 2, -1)]


class Wide(nn.Module):
    """Much to keep for little computing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.sigmoid(torch.nn.functional.gelu(self.up(self.norm(x))))))


class Heavy(nn.Module):
    """Much computing, and little to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 8192, bias=False), nn.Linear(8192, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class TwoKinds(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(Wide() for _ in range(6))
        self.heavy = nn.ModuleList(Heavy() for _ in range(3))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for block in (*self.wide, *self.heavy):
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def found(budget_gib: float, **options: Any) -> PlanReport:
    with torch.device("meta"):
        module = TwoKinds()
    given: dict[str, Any] = {"mesh": {"dp_shard": 2}, "plan": "auto", "world_size": 2, "hardware": "h100"}
    given |= {"activation_checkpointing": "auto", **options}
    return plan(module, torch.zeros(2**13, 256), memory_budget_gib=budget_gib, **given)


def policy_of(report: PlanReport) -> str:
    (note,) = [note for note in report.notes if "recomputing" in note]
    return note.rpartition("recomputing ")[2]


@pytest.mark.parametrize(("budget", "by_kind"), [(1.0, True), pytest.param(0.8, False, marks=pytest.mark.matrix)])
def test_less_is_computed_than_with_the_first_policy_that_fits(
    budget: float, by_kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same room: one kind by its own policy, or all blocks by a later one."""
    lighter = found(budget)
    monkeypatch.setattr(found_plan, "find_lighter", lambda *arguments: arguments[4])
    first = found(budget)
    assert ("=" in policy_of(lighter)) == by_kind and policy_of(first) == "selective"
    for report in (lighter, first):
        assert report.training_peak_bytes is not None and report.training_peak_bytes <= budget * GIB
    assert lighter.step_time_us is not None and first.step_time_us is not None
    assert lighter.step_time_us < 0.95 * first.step_time_us


def test_where_the_lighter_plan_cannot_be_made_the_first_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what was tried leave a trace."""
    expected = found(0.6)
    tried: list[str] = []
    within = found_plan._find_within

    def failing(*arguments: Any, **options: Any) -> Any:
        policy = arguments[3]
        if policy not in ("none", "selective"):
            tried.append(policy)
            found_now = arguments[1].found
            found_now.spec, found_now.notes, found_now.policy = None, ("spoilt",), policy
            raise PassError("no such bucket")
        return within(*arguments, **options)

    monkeypatch.setattr(found_plan, "_find_within", failing)
    report = found(0.8)
    assert tried and policy_of(report) == policy_of(expected) == "selective"
    assert report.step_time_us is not None


def test_where_nothing_is_recomputed_no_kind_is() -> None:
    assert policy_of(found(80.0)) == "none"
