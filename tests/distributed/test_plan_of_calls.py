"""`auto` in trainings whose steps run their own Python: one plan for the calls of modules that the first step made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import lower
from lightning_autoparallel.errors import UnsupportedOpError
from tests.distributed.jobs import Outcome, train
from tests.distributed.test_auto_plan import Found
from tests.support.worlds import Worlds


class Called(Found):
    """The blocks in Python's hands: one is called twice, the head's bias is read by the step itself."""

    epochs = 3
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "capture": "forward"}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = self.net(x)
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        x = torch.tanh(x.mean(1) + self.head.bias.sum())
        return nn.functional.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)  # Adam blows up rounding where gradients are 0

    def on_train_end(self) -> None:
        (optimizer,) = self.trainer.optimizers
        named = dict(self.named_parameters())
        shards = {name: _placements(parameter) for name, parameter in named.items()}
        moments = {
            name: _placements(optimizer.state[one]["momentum_buffer"] if one.requires_grad else one)
            for name, one in named.items()
        }
        reports = getattr(self.trainer.strategy, "reports", {})
        notes = {note for report in reports.values() for note in report.notes}
        solved = {report.solved for report in reports.values()} - {None}
        self.seen = {"shards": shards, "follow": moments == shards, "notes": notes, "solved": solved}
        self.seen["calls"] = len(reports)

    def extra(self) -> Any:
        return self.seen


def _placements(value: torch.Tensor) -> list[str]:
    return [str(each) for each in value.placements] if isinstance(value, DTensor) else []


class Tight(Called):
    """Layers without activations to speak of; whole, they take three times their bytes, with gradient and momentum."""

    strategy: ClassVar[Mapping[str, Any]] = {
        **Called.strategy,
        "memory_budget_gib": 2.7 * 12 * 64 * 65 * 4 / 2**30,
        "bucket_mb": 64 * 65 * 4 / 1e6,  # else all layers are gathered at once, and none is spared
    }

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(6, 64)), nn.Linear(64, 3)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = self.net(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 4
        return nn.functional.cross_entropy(self.head(x), y)


class Distilled(Called):
    """A teacher that is called without gradients: in no graph that is planned."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0]).argmax(-1)
        return super().loss((batch[0], wanted))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Ruled(Distilled):
    """A rule of a parameter that no planned call reads, and one that has tp cut everything there is."""

    strategy: ClassVar[Mapping[str, Any]] = {
        **Called.strategy,
        "plan": {
            "rules": {"teacher.0.weight": {"tp": "R"}, "teacher.2.weight": {"tp": "R"}, "*.up.weight": {"tp": "S(0)"}}
        },
    }


class Impossible(Called):
    strategy: ClassVar[Mapping[str, Any]] = {**Called.strategy, "memory_budget_gib": 1e-6}


class Recomputed(Impossible):
    """What is recomputed was to be found with the plan, of blocks within the call of one module."""

    strategy: ClassVar[Mapping[str, Any]] = {**Impossible.strategy, "activation_checkpointing": "auto"}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.layers(self.net(x)).mean(1)), y)

    def on_train_end(self) -> None:
        super().on_train_end()
        reports = self.trainer.strategy.reports if self.trainer.world_size > 1 else {}
        peaks = [report.predicted_peak_bytes for name, report in reports.items() if name.endswith(":layers")]
        self.seen["peak"] = peaks and max(peaks)


class Saved(Recomputed):
    strategy: ClassVar[Mapping[str, Any]] = {**Impossible.strategy, "activation_checkpointing": "none"}


class Uncaptured(Called):
    """Every module reads a value, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Reads(), nn.Unflatten(1, (6, 1)))
        self.layers, self.head = nn.Sequential(*(Reads() for _ in range(2))), Reads(1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.layers(self.net(x))).mean((1, 2)), y.float())


class Reads(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if float(x.detach().sum()) < math.inf else x


def fit(kind: type[Called], mesh: Mapping[str, int]) -> Outcome:
    return train(kind, mesh, math.prod(mesh.values()))


def compare(kind: type[Called], mesh: Mapping[str, int], worlds: Worlds) -> Outcome:
    """Ranks train as one device does; what the first of them saw."""
    ranks = worlds(math.prod(mesh.values())).run(fit, kind, mesh)
    expected = train(kind, None)
    for rank in ranks:
        torch.testing.assert_close(rank.parameters, expected.parameters, rtol=1e-4, atol=1e-5)
        assert rank.extra["follow"]
        assert rank.extra["solved"] == ranks[0].extra["solved"]  # which rank 0 has told the others
    return ranks[0]


def test_with_room_parameters_are_whole_after_the_first_step(worlds: Worlds) -> None:
    told = compare(Called, {"dp_shard": 2}, worlds).extra
    assert {tuple(placements) for placements in told["shards"].values()} == {("R",)}
    assert told["solved"] and any("solved in" in note for note in told["notes"]), told["notes"]
    assert told["calls"] > 5


def test_what_no_planned_call_reads_stays_in_shards(worlds: Worlds) -> None:
    shards = compare(Distilled, {"dp_shard": 2}, worlds).extra["shards"]
    assert {name for name, placements in shards.items() if placements != ["R"]} == {
        name for name in shards if name.startswith("teacher.")
    }


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.matrix)], ids=len)
def test_rules_of_what_no_planned_call_reads_are_no_reason_to_find_none(
    mesh: Mapping[str, int], worlds: Worlds
) -> None:
    outcome = compare(Ruled, mesh, worlds)
    assert not outcome.said("was not found"), [text for text in outcome.warnings if "not found" in text]
    assert outcome.extra["solved"] and any("solved in" in note for note in outcome.extra["notes"])


def test_without_room_they_lie_in_shards_as_it_takes(worlds: Worlds) -> None:
    outcome = compare(Tight, {"dp_shard": 2}, worlds)
    cut = {name for name, placements in outcome.extra["shards"].items() if placements != ["R"]}
    assert any(name.startswith("layers.") for name in cut), outcome.extra
    assert not outcome.said("was not found"), [text for text in outcome.warnings if "not found" in text]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=lambda mesh: "x".join(mesh)
)
def test_on_several_axes(mesh: Mapping[str, int], worlds: Worlds) -> None:
    outcome = compare(Called, mesh, worlds)
    assert outcome.extra["solved"], outcome.extra["notes"]
    assert any("solved in" in note for note in outcome.extra["notes"]), outcome.extra["notes"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        pytest.param(Impossible, "no plan fits", marks=pytest.mark.matrix),
        (Uncaptured, "no call of a module was captured"),
    ],
)
def test_where_no_plan_is_found_the_training_goes_on(kind: type[Called], reason: str, worlds: Worlds) -> None:
    outcome = compare(kind, {"dp_shard": 2}, worlds)
    (told,) = [text for text in outcome.warnings if "plan 'auto'" in text]
    assert "as plan 'fsdp' has them" in told and reason in told


def test_where_no_plan_is_found_all_is_recomputed_that_was_left_open(worlds: Worlds) -> None:
    """Who leaves it open wants what fits: saving everything is what takes most."""
    outcome = compare(Recomputed, {"dp_shard": 2}, worlds)
    assert outcome.said("and backwards recompute every block") == 1
    assert not outcome.said("has no effect"), "of what nobody wrote"
    saved = compare(Saved, {"dp_shard": 2}, worlds)
    assert outcome.extra["peak"] < saved.extra["peak"]
    assert not saved.said("recompute every block")


class Anyhow(Called):
    """Whole if it may be."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto"}


def refuse_whole_steps(node: Any, plan: Any, is_local: bool) -> None:
    if not is_local:
        raise UnsupportedOpError("ranks would draw otherwise")


def fit_without_whole_steps(mesh: Mapping[str, int]) -> Outcome:
    with mock.patch.object(lower, "check_masks", refuse_whole_steps):
        return fit(Anyhow, mesh)


def test_a_step_that_is_refused_as_it_is_written_for_ranks_is_planned_by_its_calls(worlds: Worlds) -> None:
    outcome = worlds(2).run(fit_without_whole_steps, {"dp_shard": 2})[0]
    assert outcome.said("runs in forward mode") == outcome.said("ranks would draw otherwise") == 1
    assert outcome.extra["solved"], outcome.extra["notes"]
    assert any("solved in" in note for note in outcome.extra["notes"]), outcome.extra["notes"]
