"""Plans that are found fit the memory of a rank, recompute what they must for it, and say why none does."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.cost.optimizer import ADAMW
from lightning_autoparallel.errors import ConfigError, InfeasiblePlanError, PassError
from lightning_autoparallel.lightning_compat import LightningModule
from lightning_autoparallel.pipeline import found_plan, partitioning, stages
from lightning_autoparallel.pipeline.contest import Contest
from lightning_autoparallel.pipeline.fastest_plan import Answer
from lightning_autoparallel.pipeline.found_plan import FoundPlan, OverBudgetError
from lightning_autoparallel.pipeline.progress import Stage
from lightning_autoparallel.pipeline.rewriting import StepRewriting
from lightning_autoparallel.plan import integer_programme, memory_room, other_plans
from lightning_autoparallel.strategy.planning import plan

GIB = 2**30


class Deep(LightningModule):
    """Eight blocks of two wide products; their activations are larger than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8))
        )

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def found(budget_gib: float, rows: int = 2**13, **options: Any) -> PlanReport:
    with torch.device("meta"):
        module = Deep()
    given = {"mesh": {"dp_shard": 8}, "plan": "auto", "world_size": 8, "hardware": "h100", **options}
    return plan(module, torch.zeros(rows, 512), memory_budget_gib=budget_gib, **given)


def said(report: PlanReport) -> list[str]:
    return [note for note in report.notes if "recomputing" in note]


def lying(report: PlanReport) -> set[str]:
    """How weights, which are nearly all there is, lie over the ranks that share out the batch."""
    weights = [one for name, one in report.parameters.items() if name.endswith("weight")]
    assert len(weights) == 16
    return {one.placements["dp_shard"] for one in weights}


def test_where_memory_is_short_parameters_are_shared_out() -> None:
    """Much room gives what data parallelism does, little what FSDP does: all weights are whole, or all in shards."""
    roomy, tight = (found(budget, rows=64, reshard_after_forward=True) for budget in (80.0, 0.12))
    assert roomy.training_peak_bytes is not None and tight.training_peak_bytes is not None
    assert tight.training_peak_bytes <= 0.12 * GIB < roomy.training_peak_bytes
    assert (lying(roomy), lying(tight)) == ({"R"}, {"S(0)"})


def test_what_the_allocator_reserves_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter beside what is alive: of 80 GiB the solver has 64."""
    rooms: list[float] = []
    kept = found_plan.solved

    def told(captured: Any, context: Any, costs: Any, room_bytes: float, saved: Any) -> Any:
        rooms.append(room_bytes)
        return kept(captured, context, costs, room_bytes, saved)

    monkeypatch.setattr(found_plan, "solved", told)
    report = found(80.0, rows=64, hardware={"base": "h100", "reserved_share": 0.25})
    assert rooms == [64 * GIB]
    assert report.training_peak_bytes is not None
    assert f"{report.training_peak_bytes * 1.25 / GIB:.3g} of 80 GiB on a rank" in said(report)[0]


def test_what_passes_made_of_a_step_is_beside_what_the_allocator_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GiB are kept, and 1 GiB is alive beside them: with a tenth reserved they are 4.4."""
    monkeypatch.setattr(found_plan, "kept_bytes", lambda captured, plan, state: 3.0 * GIB)
    plan: Any = SimpleNamespace(found="a spec")
    report: Any = SimpleNamespace(predicted_peak_bytes=GIB)
    hardware = replace(hardware_from("h100"), reserved_share=0.1)
    FoundPlan(budget_bytes=4.5 * GIB, rounds=1).check_memory(plan, plan, report, hardware)
    with pytest.raises(OverBudgetError, match=r"take 4\.4 GiB of a rank, of 4\.3 that") as caught:
        FoundPlan(budget_bytes=4.3 * GIB, rounds=1).check_memory(plan, plan, report, hardware)
    assert caught.value.taken_bytes == pytest.approx(4.4 * GIB)


def test_parameters_that_a_step_does_not_read_take_what_the_allocator_holds_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 80 GiB there are 70 for a plan, where 8 GiB are alive beside it and a quarter more is reserved."""
    given: list[float] = []
    for name in ("check_same_graph", "check_same_settings", "staying", "_settings"):
        monkeypatch.setattr(found_plan, name, MagicMock())
    hardware = replace(hardware_from("h100"), reserved_share=0.25)
    monkeypatch.setattr(found_plan, "cost_model", lambda *args: SimpleNamespace(hardware=hardware))
    monkeypatch.setattr(found_plan, "budget_bytes", lambda *args: 80.0 * GIB)
    monkeypatch.setattr(found_plan, "_find_within", lambda *args, budget_bytes, layouts: given.append(budget_bytes))
    context: Any = MagicMock(found=FoundPlan(), checkpointing="none")
    context.control.told_by_first = lambda told: told
    found_plan.find_plan_of(MagicMock(), context, {}, {}, (ADAMW, None), 8.0 * GIB)
    assert given == [70.0 * GIB]


def test_the_seconds_of_a_plan_are_those_of_all_rounds_and_stages_count_once() -> None:
    capturing, finding = (Stage(name="a stage", began_s=0.0, seconds=seconds) for seconds in (1.0, 5.0))
    step: Any = SimpleNamespace(timings={"apply": 0.5, "passes": 1.5})
    plan_of_it = FoundPlan(rounds=1)
    assert found_plan._seconds(plan_of_it, capturing, finding, step) == {"capture": 1.0, "find": 3.0}
    plan_of_it.rounds = 2
    assert found_plan._seconds(plan_of_it, capturing, finding, None) == {"capture": 2.0, "find": 8.0}
    plan_of_it.rounds = 1
    assert found_plan._seconds(plan_of_it, capturing, finding, None) == {"capture": 1.0, "find": 5.0}


def test_what_fits_by_no_reckoning_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In less room the solver would find the same plan again, and the passes what it needs."""
    searched: list[float] = []
    kept = found_plan.solved

    def counted(captured: Any, context: Any, costs: Any, room_bytes: float, saved: Any) -> Any:
        answers = kept(captured, context, costs, room_bytes, saved)
        searched.append(answers[0].stays_bytes / room_bytes)
        return answers

    monkeypatch.setattr(found_plan, "solved", counted)
    with pytest.raises(InfeasiblePlanError, match="the leanest plan that was found needs"):
        found(0.2)
    assert len(searched) == 1 and searched[0] > 1


class WithSGD(Deep):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_was_captured_to_find_the_plan_is_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured, applied or partitioned again for the plan that was taken."""
    partitions: list[str] = []

    def partition(sharded: Any, *options: Any) -> Any:
        partitions.append(sharded.name)
        return partition_graph(sharded, *options)

    def again(request: Any) -> Any:
        raise AssertionError("captured again")

    monkeypatch.setattr(partitioning, "partition_graph", partition)
    monkeypatch.setattr(stages, "capture_step", again)
    begun: list[int] = []
    all_begun = Contest._all_begun
    monkeypatch.setattr(Contest, "_all_begun", lambda self, plans: begun.append(len(plans)) or all_begun(self, plans))
    report = found(80.0, rows=64)
    assert begun == [len(partitions)] and begun[0] > 1
    assert list(report.timings_s)[:2] == ["capture", "find"]
    assert all(report.timings_s[stage] > 0 for stage in ("capture", "find", "passes"))


def test_the_module_s_own_optimizer_counts() -> None:
    """Without moments twice as much of the parameters may lie whole."""
    peaks = []
    for kind in (Deep, WithSGD):
        with torch.device("meta"):
            module = kind()
        mesh: dict[str, Any] = {"mesh": {"dp_shard": 8}, "plan": "auto", "world_size": 8, "hardware": "h100"}
        report = plan(module, torch.zeros(64, 512), memory_budget_gib=0.19, reshard_after_forward=True, **mesh)
        assert report.training_peak_bytes is not None and report.training_peak_bytes <= 0.19 * GIB
        peaks.append(report.parameters_bytes)
    assert peaks[0] < peaks[1]


def test_as_little_is_recomputed_as_fits() -> None:
    policies = []
    for budget in (80.0, 0.9):
        report = found(budget, activation_checkpointing="auto")
        assert report.training_peak_bytes is not None and report.training_peak_bytes <= budget * GIB
        policies += [note.rpartition(" ")[2] for note in said(report)] or ["none"]
    assert policies == ["none", "layer:2"], "selective keeps of a perceptron what full does"


def test_one_rank_recomputes_what_it_must_too() -> None:
    """There is nothing to place, but a budget to keep to."""
    alone: dict[str, Any] = {"rows": 2**13 // 8, "world_size": 1, "mesh": {"dp_shard": 1}}
    policies = []
    for budget in (80.0, 0.32):
        report = found(budget, activation_checkpointing="auto", **alone)
        assert report.training_peak_bytes is not None and report.training_peak_bytes <= budget * GIB
        policies += [note.rpartition(" ")[2] for note in said(report)] or ["none"]
    assert policies[0] == "none" != policies[1]
    with pytest.raises(InfeasiblePlanError, match=r"activation_checkpointing .selective."):
        found(0.32, **alone)


def test_gradients_that_add_up_take_room() -> None:
    """Those of earlier micro-batches, a copy more: where memory was just enough for one, more is shared out."""
    again: dict[str, Any] = {"rows": 64, "reshard_after_forward": True}
    roomy = found(80.0, **again)
    assert roomy.training_peak_bytes is not None
    budget = roomy.training_peak_bytes * 1.01 / GIB
    one, several = found(budget, **again), found(budget, **again, accumulate_grad_batches=4)
    assert one.parameters_bytes == roomy.parameters_bytes > several.parameters_bytes
    assert several.training_peak_bytes is not None and several.training_peak_bytes <= budget * GIB
    alike = [found(80.0, rows=64, plan="fsdp", accumulate_grad_batches=count) for count in (1, 4)]
    peaks = [report.predictions["backward"].peak_memory_bytes for report in alike]
    assert peaks[1] - peaks[0] == alike[0].gradients_bytes


def test_an_update_that_comes_once_for_many_micro_batches_counts_once() -> None:
    """Of parameters that lie whole it takes eight times as long, and nothing else of a step does."""
    slow = {"base": "h100", "optimizer_gb_per_s": 200.0}
    one, many = (found(80.0, rows=64, hardware=slow, accumulate_grad_batches=count) for count in (1, 64))
    assert one.parameters_bytes * 8 == pytest.approx(many.parameters_bytes, rel=0.01)


class Ruled(LightningModule):
    """Blocks whose parameters rules place, all of them: only activations may lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(4))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            batch = batch + down(nn.functional.gelu(up(norm(batch))))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_plans_that_differ_in_activations_only_are_other_plans() -> None:
    rules = {"*": {"tp": "R"}, "ups.*": {"tp": "S(0)"}, "downs.*": {"tp": "S(1)"}, "stored:norms.*": {"tp": "R"}}
    peaks = []
    for budget_gib in (None, 2.75e6 / GIB):
        with torch.device("meta"):
            module = Ruled()
        mesh: dict[str, Any] = {"mesh": {"tp": 2}, "world_size": 2, "hardware": "h100", "loss_chunks": 1}
        report = plan(module, torch.zeros(8, 64, 64), plan={"rules": rules}, memory_budget_gib=budget_gib, **mesh)
        peaks.append(report.training_peak_bytes)
    assert peaks[1] is not None and peaks[1] <= 2.75e6 < peaks[0]


def test_a_plan_that_was_not_found_is_looked_for_in_the_next_training() -> None:
    plan_of_it, module = FoundPlan(is_open=False, rounds=3, missing_bytes=5.0), Deep()
    plan_of_it.forget_others(module)
    assert (plan_of_it.is_open, plan_of_it.rounds, plan_of_it.missing_bytes) == (True, 0, 0.0)
    plan_of_it.answer, plan_of_it.is_open = Answer(spec=PlanSpec.parse("fsdp"), document={}, notes=()), False
    plan_of_it.remember(module)
    plan_of_it.forget_others(module)
    assert not plan_of_it.is_open, "it was found for this module"


def test_a_file_has_what_its_plan_recomputes(tmp_path: Path) -> None:
    """``auto`` takes it from there; whoever recomputes otherwise is told."""
    planned = found(0.9, activation_checkpointing="auto", dump_dir=str(tmp_path))
    (policy,) = [note.rpartition(" ")[2] for note in said(planned)]
    given: dict[str, Any] = {"plan": str(tmp_path / "training_step" / "plan.json")}
    again = found(0.9, activation_checkpointing="auto", **given)
    assert policy != "none" and again.saved_bytes == planned.saved_bytes
    assert again.training_peak_bytes == planned.training_peak_bytes
    with pytest.warns(UserWarning, match=rf"recomputes {policy}, and this training none: .* 'auto' takes"):
        without = found(0.9, **given)
    assert without.saved_bytes > planned.saved_bytes
    document = json.loads(Path(given["plan"]).read_text())
    assert document.pop("activation_checkpointing") == policy and document["found"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"with .*old\.json, which names no policy of its plan, write 'none'"):
        found(0.9, activation_checkpointing="auto", plan=str(tmp_path / "old.json"))


def test_who_recomputes_more_than_a_file_says_is_not_warned(tmp_path: Path) -> None:
    """Nor is a policy refused that has no name."""
    found(80.0, rows=64, dump_dir=str(tmp_path))
    given: dict[str, Any] = {"plan": str(tmp_path / "training_step" / "plan.json"), "rows": 64}
    for policy in ("full", partial(_wish, "recompute")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert "rules" in found(80.0, activation_checkpointing=policy, **given).plan
        assert not [each for each in caught if "plan.json recomputes" in str(each.message)]


def _wish(wish: str, node: Any) -> str:
    return wish


def test_what_never_fits_says_what_would() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"no plan fits: .* at least 0.0.* GiB .* more ranks on dp_shard"):
        found(0.01)
    with pytest.raises(
        InfeasiblePlanError, match=r"'none': the leanest plan that was found needs .*'full': .* at the step's peak"
    ):
        found(0.2, activation_checkpointing="auto")


class Convolves(LightningModule):
    """Its first weight could lie cut along its last dim, with which nothing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 8, 4, padding=1), nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(batch).transpose(1, 2)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def ruled(rules: Any, mesh: Any, **options: Any) -> PlanReport:
    with torch.device("meta"):
        module = Convolves()
    given = {"plan": {"rules": rules}, "world_size": 4, "hardware": "h100", "memory_budget_gib": 1.0, **options}
    return plan(module, torch.zeros(8, 4, 16), mesh, **given)


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_rules_that_leave_no_plan_are_named(policy: str) -> None:
    """Once, whatever might be recomputed."""
    with pytest.raises(InfeasiblePlanError, match=r"nothing leads from S\(2\) to R for conv\.weight") as caught:
        ruled({"conv.weight": {"tp": "S(2)"}}, {"dp_shard": 2, "tp": 2}, activation_checkpointing=policy)
    assert str(caught.value).count("nothing leads") == 1 and "leave out the rule" in str(caught.value)


def test_rules_of_an_axis_that_is_not_there_are_told() -> None:
    given = {"conv.weight": {"tp": "S(0)"}, "stored:out.weight": {"dp_shard": "S(0)"}}
    told = [note for note in ruled(given, {"dp_shard": 4}).notes if "does nothing" in note]
    assert told == ["plan auto: what the rule of 'conv.weight' says of tp does nothing on mesh {dp_shard: 4}"]


def test_what_is_wrong_on_every_mesh_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"^rule 'convolution\.weight' matches no parameter"):
        ruled({"convolution.weight": {"tp": "S(0)"}}, "auto")


class UnknownOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class WithUnknown(Deep):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return UnknownOptimizer(self.parameters())


def test_a_refusal_says_where_the_optimizer_is_a_guess() -> None:
    with torch.device("meta"):
        modules = WithUnknown(), WithSGD()
    for module in modules:
        with pytest.raises(InfeasiblePlanError) as caught:
            plan(module, torch.zeros(64, 512), {"dp_shard": 8}, plan="auto", world_size=8, memory_budget_gib=0.01)
        is_guess = isinstance(module, WithUnknown)
        assert ("the step of UnknownOptimizer is not one of torch's own" in str(caught.value)) == is_guess


def test_a_budget_is_a_number_and_auto_goes_with_auto() -> None:
    with pytest.raises(ConfigError, match="memory_budget_gib=-1: give a positive number"):
        found(-1)
    with pytest.raises(ConfigError, match="activation_checkpointing 'auto' goes with plan 'auto'"):
        found(80.0, plan="fsdp", activation_checkpointing="auto")


def test_another_plan_that_passes_fail_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on the best is an error as before."""
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    monkeypatch.setattr(Contest, "_reason_against", lambda self, one: None)
    begun: list[int] = []
    failing = {2}
    begin = StepRewriting.begin

    def failing_begin(self: StepRewriting, *arguments: Any) -> None:
        begun.append(len(begun) + 1)
        if begun[-1] in failing:
            raise PassError("no such bucket")
        begin(self, *arguments)

    monkeypatch.setattr(StepRewriting, "begin", failing_begin)
    notes = found(80.0, rows=64).notes
    assert len(begun) > 2
    assert "plan auto: another plan was left out: PassError: no such bucket" in notes
    assert any(f"{len(begun) - 1} plans were taken through the passes" in note for note in notes)
    begun.clear()
    failing.add(1)
    with pytest.raises(PassError, match="no such bucket"):
        found(80.0, rows=64)


def test_what_a_step_takes_at_least_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not much less: else no plan could be left out for it."""
    monkeypatch.setattr(other_plans, "_WITHIN", 10.0)
    monkeypatch.setattr(Contest, "_reason_against", lambda self, one: None)
    seen: list[tuple[float, float | None]] = []
    finished = Contest._finished

    def look(self: Contest, one: Any) -> Any:
        contender = finished(self, one)
        seen.append((one.least_us, contender.forecast.time_us))
        return contender

    monkeypatch.setattr(Contest, "_finished", look)
    for mesh in ({"dp_shard": 8}, {"dp_shard": 2, "tp": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}):
        for hardware in ("h100", "cpu"):
            found(80.0, rows=2**12, mesh=mesh, hardware=hardware)
    assert len(seen) > 12
    for least_us, time_us in seen:
        assert time_us is not None and 0.4 * time_us < least_us < 1.001 * time_us


def test_where_the_solver_has_no_time_steps_are_planned_as_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in shards over all ranks, gathered where they are used; a budget that nothing fits is an error."""
    searches: list[int] = []

    def late(problem: Any, *options: Any, **more: Any) -> Any:
        searches.append(len(problem.choices))
        return integer_programme.solve(problem, time_limit_s=0.0)

    monkeypatch.setattr(memory_room, "solve", late)
    said = r"plan 'auto' was not found in time for training_step: .* all ranks of tp compute .* 'Time limit reached'"
    mesh = {"dp_shard": 4, "tp": 2}
    with pytest.warns(UserWarning, match=said):
        report = found(80.0, rows=64, mesh=mesh, activation_checkpointing="auto")
    rules = {"*": {"tp": "R"}, "stored:*": {"dp_shard": "S(0)", "tp": "S(0)"}}
    as_before = found(80.0, rows=64, mesh=mesh, plan={"base": "fsdp", "rules": rules})
    assert len(searches) == 1, "more recomputing would not take less time to solve"
    assert report.parameters_bytes == as_before.parameters_bytes and report.launches() == as_before.launches()
    with pytest.raises(InfeasiblePlanError, match="no plan fits"):
        found(0.01, rows=64)
