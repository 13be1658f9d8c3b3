"""The stages, in order: capture -> plan -> apply -> passes -> partition -> specialize -> lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from lightning_autoparallel.apply import UnreducedLayout
from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.compile import lower_partitioned, specialize_partitioned
from lightning_autoparallel.config import AUTO, EngineConfig, PlanSpec
from lightning_autoparallel.contracts import (
    CapturedGraph,
    CheckpointFunction,
    CompiledStep,
    EarlierGradients,
    Explanation,
    GraphCallable,
    PartitionedGraph,
    PlanReport,
    ShardingPlan,
)
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.compiled_once import compiling_turn
from lightning_autoparallel.pipeline.fastest_plan import RewrittenStep
from lightning_autoparallel.pipeline.found_plan import FoundPlan
from lightning_autoparallel.pipeline.kept_plan import policy_name
from lightning_autoparallel.pipeline.memory_budget import told_of_budget
from lightning_autoparallel.pipeline.own_writes import OwnWrites
from lightning_autoparallel.pipeline.predict import cost_model, with_predictions
from lightning_autoparallel.pipeline.progress import StageClock, StageProgress, stage_clock
from lightning_autoparallel.pipeline.rewriting import StepRewriting
from lightning_autoparallel.pipeline.same_order import check_same_graph, check_same_order
from lightning_autoparallel.pipeline.summary import make_report
from lightning_autoparallel.plan import (
    explain_rules,
    kept_plan_of,
    make_plan,
    plan_document,
    read_plan,
    restore_plan,
)
from lightning_autoparallel.plan.local import local_spec
from lightning_autoparallel.torch_compat.collectives import group_place


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What the stages need besides the step: where it runs, how, and whom to tell.

    Where it ``rehearses``, steps run in a fake world too. ``earlier_gradients`` says of a captured step what becomes of
    the gradients that lie on this rank as it begins, ``micro_batches`` how many of it one step of the optimizers is
    for. ``planned`` counts the captures of a step, by its name and the plan in force, that have come as far as a plan.
    ``own_writes`` are those of steps and hooks into parameters that ranks have not compared yet.
    """

    mesh: ParallelMesh
    config: EngineConfig
    control: ControlGroup
    warn: Callable[[str], None]
    progress: StageProgress = field(default_factory=StageProgress)
    told: set[str] = field(default_factory=set)
    planned: Counter[tuple[str, PlanSpec]] = field(default_factory=Counter)
    found: FoundPlan = field(default_factory=FoundPlan)
    own_writes: OwnWrites = field(default_factory=OwnWrites)
    rehearses: bool = False
    earlier_gradients: Callable[[CapturedGraph], EarlierGradients] = lambda captured: "cleared"
    micro_batches: Callable[[CapturedGraph], int] = lambda captured: 1

    @property
    def plan(self) -> PlanSpec:
        """What steps are placed by: the configured plan, or what stands in the place of ``auto``."""
        return self.found.in_force(self.config.plan, self.mesh)

    @property
    def has_planned(self) -> bool:
        """Whether rules have been held against the module: what they miss later has been tied to another weight."""
        return self.planned.total() > 0

    def matching_plan(self, parameters: Mapping[str, object]) -> PlanSpec:
        """The plan in force, without the rules that miss all ``parameters``; a plan that is new must have none."""
        matching = local_spec(self.plan, parameters) if self.has_planned else self.plan
        for rule in [rule for rule in self.plan.rules if rule not in matching.rules]:
            self.warn_once(f"autoparallel: rule '{rule.key}' matches no parameter any more: it is left out")
        return matching

    @property
    def checkpointing(self) -> str | CheckpointFunction:
        """What backwards recompute where no plan is found: for ``auto`` what that of a file does, else all blocks."""
        policy = self.config.activation_checkpointing
        return (self.config.plan.recomputes or "full") if policy == AUTO else policy

    @property
    def recomputing(self) -> str | CheckpointFunction:
        """What backwards recompute."""
        return self.found.policy or self.checkpointing

    def warn_once(self, message: str) -> None:
        """Warn, unless this was said of another graph."""
        if message not in self.told:
            self.told.add(message)
            self.warn(message)


def build_step(
    request: StepRequest, context: StageContext, waiting: Mapping[str, UnreducedLayout] | None = None
) -> CompiledStep:
    """Take one step through all stages; every rank calls it with an equal request.

    Gradients of the parameters in ``waiting`` leave the step unreduced.

    Raises:
        CaptureError: the step cannot be recorded, on this rank or on another, or ranks recorded different graphs.
        ConfigError: the plan does not fit the mesh.
        PassError: ranks have different settings, or their graphs came out different.
    """
    held = context.found.take_held(request)
    timings: dict[str, float] = {} if held is None else dict(held.seconds)
    clock = stage_clock(request.name, timings, context.progress)
    captured, plan = _agreed_plan(request, context, clock, None if held is None else held.captured)
    rewritten = held.step if held is not None and not waiting else None
    compiles = context.config.compile
    return finish_step(captured, plan, context, request.device, compiles, timings, rewritten, waiting or {})


def finish_step(
    captured: CapturedGraph,
    plan: ShardingPlan,
    context: StageContext,
    device: torch.device,
    compiles: bool,
    timings: dict[str, float] | None = None,
    rewritten: RewrittenStep | None = None,
    waiting: Mapping[str, UnreducedLayout] = MappingProxyType({}),
) -> CompiledStep:
    """The stages after the plan, which all ranks have agreed on; ``timings`` are those of the stages before.

    Where passes have ``rewritten`` the step already, that is taken. Gradients of the parameters in ``waiting`` leave it
    unreduced, of which a plan file says nothing: that is each training's own.

    Raises:
        ConfigError: the plan does not fit the mesh.
        PassError: ranks have different settings, or their graphs came out different.
    """
    timings = {} if timings is None else timings
    spec, written = plan.found or context.plan, plan
    plan = _waiting(plan, captured, waiting)
    clock = stage_clock(captured.name, timings, context.progress)
    artifacts = ArtifactWriter(context.config.dump_dir if context.mesh.device_mesh.get_rank() == 0 else None)
    costs = cost_model(context.config, context.mesh, context.control, context.warn_once)
    if rewritten is None:
        rewritten = StepRewriting(captured.name, context, costs, artifacts).run(captured, plan)
    timings.update(rewritten.timings)
    partitioned, passes = rewritten.partitioned, rewritten.passes
    for message in rewritten.warnings:
        context.warn_once(message)
    check_same_order(partitioned, context.control)
    report = make_report(captured, partitioned, plan, passes, timings, context.mesh)
    report = replace(report, notes=(*report.notes, *plan.notes))
    with clock("predict"):
        report = with_predictions(report, captured, partitioned, costs, context.mesh.axes_by_group())
        context.found.check_memory(captured, plan, report, costs.hardware)
        told = told_of_budget(captured, plan, report, context.config, context.found, costs.hardware)
        if told is not None:
            context.warn_once(told)
    if context.config.explain is not None and captured.has_backward:
        with clock("explain"):
            report = replace(report, explanation=_explained(captured, plan, context, context.config.explain))
    _dump(artifacts, captured, partitioned, report)
    context.planned[captured.name, spec] += 1
    if artifacts.writes:
        recomputes = context.recomputing if isinstance(context.recomputing, str) else None  # a function is in no file
        keeps = captured.has_backward and not context.config.gathers_again(written.keeps_gathered)
        written = replace(written, keeps_gathered=keeps and not captured.local)
        document = plan_document(captured, written, spec, context.mesh, recomputes)
        # A training by the file begins as this one did, with the first capture.
        count = context.planned[captured.name, spec]
        name = "plan" if count == 1 else f"plan_of_capture_{count}"
        artifacts.record(f"{captured.name}/{name}", document)
    # In a fake world nobody runs it, unless to rehearse, and the device may not be there.
    runs = context.mesh.backend != "fake" or context.rehearses
    with clock("compile"):
        # Until here no rank's graph tells which rank it is of.
        if runs:
            context.mesh.make_groups(_groups_of(partitioned))
            partitioned = specialize_partitioned(partitioned, group_place)
        forward, backward = _lowered(partitioned, context, compiles)
    return CompiledStep(
        partitioned=partitioned,
        forward=forward,
        backward=backward,
        captured=captured,
        constants=tuple(value.to(device) if runs else value for value in captured.constants.values()),
        report=report,
        has_random_ops=any(fxn.is_random(node) for node in captured.graph_module.graph.nodes),
    )


def _explained(captured: CapturedGraph, plan: ShardingPlan, context: StageContext, pattern: str) -> Explanation:
    """Why what ``pattern`` matches is placed so.

    Raises:
        ConfigError: it matches nothing.
    """
    answer = context.found.answer
    if plan.found is not None and answer is not None and answer.explain is not None:
        return answer.explain(pattern)
    return explain_rules(captured, plan, context.plan, pattern)


def _waiting(plan: ShardingPlan, captured: CapturedGraph, waiting: Mapping[str, UnreducedLayout]) -> ShardingPlan:
    """The plan with gradients that leave as they are before they are reduced."""
    outputs = [
        waiting[item.name].unreduced.placements if item.is_parameter_gradient and item.name in waiting else placements
        for item, placements in zip(captured.outputs, plan.outputs, strict=True)
    ]
    return replace(plan, outputs=tuple(outputs))


def _groups_of(partitioned: PartitionedGraph) -> set[str]:
    """Names of the process groups that its calls run on."""
    calls = (node for half in partitioned.graphs().values() for node in half.graph.nodes)
    return {argument for node in calls for argument in node.args if isinstance(argument, str)}


def _lowered(
    partitioned: PartitionedGraph, context: StageContext, compiles: bool
) -> tuple[GraphCallable, GraphCallable | None]:
    """The callables of both halves; where one rank's compiler fails, no rank goes on to wait for it."""
    own, turns = compiling_turn(partitioned, context.control) if compiles else (0, 1)
    lowered: tuple[GraphCallable, GraphCallable | None] | None = None
    for turn in range(turns):
        error: Exception | None = None
        try:
            lowered = lower_partitioned(partitioned, compiles) if turn == own else lowered
        except Exception as caught:  # raised again below, once every rank knows
            error = caught
        context.control.raise_together(error)
    assert lowered is not None
    return lowered


def _agreed_plan(
    request: StepRequest, context: StageContext, clock: StageClock, captured: CapturedGraph | None = None
) -> tuple[CapturedGraph, ShardingPlan]:
    """Capture, unless that was done, and plan; an error, or a difference, of one rank is an error of all."""
    error: Exception | None = None
    plan: ShardingPlan | None = None
    try:
        with clock("capture"):
            captured = captured or capture_step(request)
        with clock("plan"):
            plan = _plan(captured, context)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    assert captured is not None and plan is not None
    check_same_graph(captured, plan, context.control)
    return captured, plan


def _plan(captured: CapturedGraph, context: StageContext) -> ShardingPlan:
    """The plan of the file that the plan was read from, if that was made for this step; else a new one.

    Later captures of that step (another batch, other parameters that train) are planned by the file's base and rules.

    Raises:
        ConfigError: the first capture is of another graph than the file.
    """
    spec = context.plan
    document = read_plan(spec.file) if spec.file is not None else None
    if document is not None and document["graph"] == captured.name:
        _tell_of_recomputing(spec, context)
        if not context.planned[captured.name, spec]:
            return restore_plan(document, captured, spec, context.mesh)
        kept = kept_plan_of(document, captured, spec, context.mesh)
        if kept is not None:
            return kept
    found = context.found.plan_of(captured, context.config.plan, context.mesh)
    if found is not None:
        return found
    if not captured.local:
        context.matching_plan({given.name: given for given in captured.inputs if given.kind == "parameter"})
    try:
        plan = make_plan(captured, spec, context.mesh, context.warn, may_miss=context.has_planned)
        answer = context.found.answer
        if not captured.local or answer is None:
            return plan
        # What was found for all calls of modules together is told with each of them.
        return replace(plan, notes=(*plan.notes, *answer.notes), solved=answer.solved)
    except InfeasiblePlanError as error:
        # Rules are found or written for the training step, and what they do not do for is told as that is planned.
        is_found = context.found.spec is not None or spec.found
        is_first = captured.has_backward and not captured.local and not context.planned[captured.name, spec]
        if is_first and not is_found:
            raise
        context.warn_once(
            f"plan {AUTO if is_found else spec.name}: {captured.name} computes with whole parameters, gathered where "
            f"they are used, because it cannot with those that are cut for the training step ({error})"
        )
        return make_plan(captured, spec, context.mesh, context.warn, computes_whole=True, may_miss=context.has_planned)


def _tell_of_recomputing(spec: PlanSpec, context: StageContext) -> None:
    """A plan that fits a rank while it recomputes may not fit without."""
    if spec.recomputes not in (None, "none", context.recomputing):
        context.warn_once(
            f"autoparallel: the plan of {spec.file} recomputes {spec.recomputes}, and this training "
            f"{policy_name(context.recomputing)}: activation_checkpointing 'auto' takes what the file says"
        )


def _dump(
    artifacts: ArtifactWriter, captured: CapturedGraph, partitioned: PartitionedGraph, report: PlanReport
) -> None:
    artifacts.graph(f"{captured.name}/captured", captured.graph_module)
    artifacts.graph(f"{captured.name}/forward", partitioned.forward)
    if partitioned.backward is not None:
        artifacts.graph(f"{captured.name}/backward", partitioned.backward)
    artifacts.record(f"{captured.name}/report", report.as_json())
