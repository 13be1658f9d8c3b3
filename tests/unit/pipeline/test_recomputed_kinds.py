"""Kinds of blocks recompute as little as fits, each by its own policy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_autoparallel.contracts import GraphInput, PlanAxis, PlanReport
from lightning_autoparallel.cost.optimizer import ADAMW
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.lightning_compat import LightningModule
from lightning_autoparallel.pipeline import found_plan, lighter_plan, solved_plans
from lightning_autoparallel.pipeline.rank_memory import may_be_spared_bytes
from lightning_autoparallel.pipeline.recomputed_kinds import MOST_KINDS, Combination, Option, first_that_fits, most_read
from lightning_autoparallel.strategy.planning import plan

GIB = 2**30


def combination(policy: str, *read_bytes: float, again_us: float = 0.0) -> Combination:
    return Combination(policy=policy, read_bytes=read_bytes, again_us=again_us)


def test_the_first_that_fits_is_found_without_a_look_at_what_reads_no_less() -> None:
    """``c`` reads of both kinds what ``a`` does, which is over; ``d`` was refused before, and ``e`` reads as much."""
    peaks = {"a": 12.0, "b": 11.0, "f": 9.0, "g": 1.0}
    asked: list[str] = []

    def peak_with(policy: str) -> float:
        asked.append(policy)
        return peaks[policy]

    ordered = [
        combination("z", 6, 6),  # more than there is, whatever else
        combination("a", 2, 5),
        combination("b", 5, 1),
        combination("c", 2, 6),
        combination("d", 3, 0),
        combination("e", 3, 1),
        combination("f", 2, 4),
        combination("g", 0, 0),
    ]
    assert first_that_fits(ordered, peak_with, 10.0, ("d",)) == "f"
    assert asked == ["a", "b", "f"]
    assert first_that_fits(ordered[:-2], peak_with, 10.0, ("d",)) is None


def test_only_so_many_are_looked_at() -> None:
    asked: list[str] = []
    ordered = [combination(str(i), i, 100 - i) for i in range(100)]
    assert first_that_fits(ordered, lambda policy: asked.append(policy) or math.inf, 1e9, ()) is None
    assert len(asked) == 16


def test_of_many_kinds_those_that_read_most() -> None:
    options = {
        f"k{i}.*": [Option(policy=policy, read_bytes=size, again_us=1.0) for policy, size in (("a", i), ("b", 0.0))]
        for i in range(MOST_KINDS + 3)
    }
    assert list(most_read(options)) == [f"k{i}.*" for i in range(MOST_KINDS + 2, 2, -1)]


def test_what_lies_in_more_than_a_rank_s_share_may_be_spared() -> None:
    """By hand, 400 bytes each on 4 ranks: one whole, in 4 copies with its moments, one cut, one frozen."""
    graph = fx.Graph()
    inputs = [GraphInput(kind="parameter", name=name) for name in ("whole", "cut", "frozen")]
    for item in inputs:
        graph.placeholder(item.name).meta = {"val": torch.empty(100)}
    gradients = [SimpleNamespace(name=name, is_parameter_gradient=True) for name in ("whole", "cut")]
    captured: Any = SimpleNamespace(graph_module=SimpleNamespace(graph=graph), inputs=inputs, outputs=gradients)
    axis = PlanAxis(mesh_axes=("dp_shard",), size=4, rank=0, group_name="g")
    lying = {"whole": (Replicate(),), "cut": (Shard(0),), "frozen": (Replicate(),)}
    plan: Any = SimpleNamespace(axes=(axis,), parameters=lying)
    assert may_be_spared_bytes(captured, plan, ADAMW, 4) == 300 * 4 + 300


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


@pytest.mark.parametrize("budget", [1.0, pytest.param(0.8, marks=pytest.mark.matrix)])
def test_less_is_computed_than_with_the_first_policy_that_fits(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same room: each kind by a policy of its own."""
    lighter = found(budget)
    monkeypatch.setattr(found_plan, "find_lighter", lambda *arguments: arguments[4])
    first = found(budget)
    assert "=" in policy_of(lighter) and policy_of(first) == "selective"
    for report in (lighter, first):
        assert report.training_peak_bytes is not None and report.training_peak_bytes <= budget * GIB
    assert lighter.step_time_us is not None and first.step_time_us is not None
    assert lighter.step_time_us < 0.95 * first.step_time_us


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is known of every plan that is found; ``from_checkpoint`` of the first is what the next is given."""
    real, seen = found_plan.find_plan_of, []

    def look(captured: Any, context: Any, *rest: Any) -> Any:
        if seen:
            context.found.from_checkpoint = seen[0].from_checkpoint
        seen.append(context.found)
        return real(captured, context, *rest)

    monkeypatch.setattr(found_plan, "find_plan_of", look)
    return seen


def test_where_the_lighter_plan_cannot_be_made_the_first_one_stays(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what was tried leave a trace."""
    lighter, within = found_plan.find_lighter, found_plan._find_within
    monkeypatch.setattr(found_plan, "find_lighter", lambda *arguments: arguments[4])
    found(0.8)
    tried: list[str] = []

    def failing(*arguments: Any, **options: Any) -> Any:
        step = within(*arguments, **options)
        if arguments[3] not in ("none", "selective"):
            tried.append(arguments[3])
            raise PassError("no such bucket")
        return step

    monkeypatch.setattr(found_plan, "find_lighter", lighter)
    monkeypatch.setattr(found_plan, "_find_within", failing)
    report = found(0.8)
    assert tried and policy_of(report) == "selective"
    first, second = plans
    for name in ("policy", "question", "predicted_bytes", "predicted_us", "rounds"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("spec", "document", "notes"):
        assert getattr(first.answer, name) == getattr(second.answer, name), name


def test_a_training_that_goes_on_recomputes_what_it_did(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is solved again."""
    before = found(1.0)
    plans[0].from_checkpoint = plans[0].for_checkpoints

    def solved(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("solved again")

    monkeypatch.setattr(solved_plans, "make_plans", solved)
    after = found(1.0)
    assert "=" in policy_of(before) and policy_of(before) in "".join(after.notes)
    assert after.solved == before.solved and after.solved is not None
    del plans[0].from_checkpoint["solved"]  # as older ones have it
    assert found(1.0).solved is None
    assert after.step_time_us == before.step_time_us and after.training_peak_bytes == before.training_peak_bytes


@pytest.mark.parametrize("held", ["what was asked for", "what is no plan of ours"])
def test_what_a_checkpoint_was_told_to_recompute_binds_no_training_that_leaves_it_open(
    held: str, plans: list[Any]
) -> None:
    found(80.0, activation_checkpointing="full")
    kept = plans[0].for_checkpoints
    plans[0].from_checkpoint = kept if held == "what was asked for" else {**kept, "question": None}
    assert policy_of(found(80.0)) == "none"


def test_where_nothing_is_recomputed_no_kind_is() -> None:
    assert policy_of(found(80.0)) == "none"


@pytest.mark.parametrize(("keeps", "is_taken"), [(True, True), (False, False)])
def test_what_gathers_again_may_take_a_little_longer(
    keeps: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than one that keeps parameters gathered, and recomputes more: as where the policy is the same."""
    monkeypatch.setattr(lighter_plan, "_policies", lambda *arguments: ("none",))
    found = SimpleNamespace(predicted_us=100.0, answer=SimpleNamespace(document={"keeps_gathered": keeps}))
    context: Any = SimpleNamespace(found=found)

    def within(policy: str) -> Any:
        found.predicted_us, found.answer = 102.0, SimpleNamespace(document={})
        return "another"

    kept: Any = "step"
    step = lighter_plan.find_lighter(None, context, None, 1, kept, within, 1.0)  # type: ignore[arg-type]
    assert (step, found.predicted_us) == (("another", 102.0) if is_taken else ("step", 100.0))
