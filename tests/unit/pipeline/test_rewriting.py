"""In which order passes run over a step's graphs, which are partitioned on the way, and that each is told of once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_autoparallel.errors import PassError
from lightning_autoparallel.lightning_compat import LightningModule
from lightning_autoparallel.passes import GraphPass, joint_passes, run_passes, split_passes
from lightning_autoparallel.pipeline import contest, rewriting
from lightning_autoparallel.pipeline.rewriting import StepRewriting
from lightning_autoparallel.strategy.planning import plan

JOINT = [each.name for each in joint_passes()]
SPLIT = [each.name for each in split_passes()]
OPTIONS: dict[str, Any] = {"mesh": {"dp_shard": 4, "tp": 2}, "world_size": 8, "hardware": "h100"}


class Language(LightningModule):
    """Its head is wide beside all else."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, vocabulary)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.middle(self.embedding(batch)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Graphs and passes that ran over them."""
    found: list[tuple[str, str]] = []

    def run(module: Any, name: str, passes: tuple[GraphPass, ...], *rest: Any) -> Any:
        found.extend((name, each.name) for each in passes)
        return run_passes(module, name, passes, *rest)

    monkeypatch.setattr(rewriting, "run_passes", run)
    return found


def over(ran: list[tuple[str, str]], graph: str) -> list[str]:
    return [name for where, name in ran if where == graph]


def planned(vocabulary: int, asked: str = "fsdp", **options: Any) -> Any:
    with torch.device("meta"):
        module = Language(vocabulary)
    rules: Any = {"base": "fsdp", "rules": {"*": {"tp": "R"}}} if asked == "fsdp" else asked
    return plan(module, torch.zeros(8, 512, dtype=torch.int64), plan=rules, **OPTIONS, **options)


def told(report: Any) -> list[tuple[str, str]]:
    return [(done.graph, done.name) for done in report.passes]


@pytest.mark.parametrize(("chunks", "is_anew"), [(1, False), (4, True)])
def test_what_a_head_in_chunks_has_partitioned_anew_is_fused_anew(
    chunks: int, is_anew: bool, ran: list[tuple[str, str]]
) -> None:
    report = planned(2048, loss_chunks=chunks)
    assert over(ran, "training_step") == JOINT
    for half in ("forward", "backward"):
        assert over(ran, f"training_step.{half}") == [SPLIT[0]] * is_anew + SPLIT
        assert [name for graph, name in told(report) if graph == f"training_step.{half}"] == SPLIT
    assert [name for graph, name in told(report) if graph == "training_step"] == JOINT


def test_without_a_backward_joint_passes_come_first_and_each_runs_once(ran: list[tuple[str, str]]) -> None:
    planned(64, inference=True)
    both = [(graph, name) for graph, name in ran if graph.startswith("validation_step")]
    assert [name for _, name in both] == JOINT + SPLIT
    assert {graph for graph, _ in both[: len(JOINT)]} == {"validation_step"}


def test_a_plan_that_fails_in_its_last_passes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_NEARER", -10.0)  # all go through
    finished: list[int] = []
    fails_at = [0]
    finish = StepRewriting.finish

    def failing(self: StepRewriting) -> Any:
        finished.append(len(finished) + 1)
        if finished[-1] in fails_at:
            raise PassError("no such bucket")
        return finish(self)

    monkeypatch.setattr(StepRewriting, "finish", failing)
    planned(2048, asked="auto", memory_budget_gib=1.0)
    places = list(finished)
    assert len(places) > 1
    said = []
    for place in places:
        finished.clear()
        fails_at[0] = place
        try:
            notes = planned(2048, asked="auto", memory_budget_gib=1.0).notes
            said.append([note for note in notes if "left out" in note])
        except PassError:
            said.append(["raised"])
    assert said.count(["raised"]) == 1  # where it is the solver's best
    assert said.count(["plan auto: another plan was left out: PassError: no such bucket"]) == len(places) - 1


@pytest.mark.parametrize(("asked", "budget_gib"), [("auto", 1.0), ("auto", 0.6), ("fsdp", 1.0)])
def test_passes_are_told_of_the_room_that_a_found_plan_leaves(
    asked: str, budget_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: set[int] = set()
    around = rewriting.surroundings_of

    def surroundings(*args: Any, room_bytes: int) -> Any:
        told.add(room_bytes)
        return around(*args, room_bytes=room_bytes)

    lean: list[float] = []
    finished = contest.Contest._finished

    def finish(*args: Any) -> Any:
        contender = finished(*args)
        lean.append(contender.forecast.lean_bytes / contender.forecast.peak_bytes)
        return contender

    monkeypatch.setattr(contest.Contest, "_finished", finish)
    monkeypatch.setattr(rewriting, "surroundings_of", surroundings)
    report = planned(2048, asked=asked, memory_budget_gib=budget_gib, loss_chunks=1)
    assert all(0.5 < share < 1.5 for share in lean) and bool(lean) is (asked == "auto")
    assert report.parameters is not None
    kept = [sum((each.parameter_bytes, each.optimizer_bytes or 0)) for each in report.parameters.values()]
    if asked == "fsdp":
        assert told == {0}
    else:
        assert int(0.9 * budget_gib * 2**30 - sum(kept)) - 2**28 in told
