"""The stages, in order: capture -> plan -> apply -> passes -> partition -> specialize -> lower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from lightning_autoparallel.apply import UnreducedLayout, lower_graph
from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.compile import lower_partitioned, specialize_partitioned
from lightning_autoparallel.config import AUTO, EngineConfig, PlanSpec
from lightning_autoparallel.contracts import (
    CapturedGraph,
    CheckpointFunction,
    CompiledStep,
    Explanation,
    GraphCallable,
    PartitionedGraph,
    PassReport,
    PlanReport,
    ShardedGraph,
    ShardingPlan,
)
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import surroundings_of
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.passes import (
    DEFAULT_BYTES,
    AxesByGroup,
    BucketLimit,
    ChunkOptions,
    DecomposeOptions,
    joint_groups,
    joint_passes,
    run_passes,
    split_passes,
)
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.compiled_once import compiling_turn
from lightning_autoparallel.pipeline.fastest_plan import Forecast, RewrittenStep
from lightning_autoparallel.pipeline.found_plan import FoundPlan
from lightning_autoparallel.pipeline.partitioning import Partitioning
from lightning_autoparallel.pipeline.predict import cost_model, forecast_of, with_predictions
from lightning_autoparallel.pipeline.progress import StageProgress
from lightning_autoparallel.pipeline.same_order import check_same_graph, check_same_order, check_same_start
from lightning_autoparallel.pipeline.summary import make_report
from lightning_autoparallel.plan import (
    explain_rules,
    make_plan,
    plan_document,
    read_plan,
    restore_plan,
)
from lightning_autoparallel.torch_compat.collectives import group_place


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What the stages need besides the step: where it runs, how, and whom to tell.

    Where it ``rehearses``, steps run in a fake world too. ``keeps_gradients`` says of a step's name whether the
    gradients of the step before are alive through its forward on this rank.
    """

    mesh: ParallelMesh
    config: EngineConfig
    control: ControlGroup
    warn: Callable[[str], None]
    progress: StageProgress = field(default_factory=StageProgress)
    told: set[str] = field(default_factory=set)
    found: FoundPlan = field(default_factory=FoundPlan)
    rehearses: bool = False
    keeps_gradients: Callable[[str], bool] = lambda name: True

    @property
    def plan(self) -> PlanSpec:
        """What steps are placed by: the configured plan, or what stands in the place of ``auto``."""
        return self.found.in_force(self.config.plan, self.mesh)

    @property
    def checkpointing(self) -> str | CheckpointFunction:
        """What backwards recompute; ``auto`` has nothing recomputed where no plan is found."""
        policy = self.config.activation_checkpointing
        return "none" if policy == AUTO else policy

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
    timings: dict[str, float] = {}
    clock = _clock(request.name, timings, context.progress)
    captured, plan = _agreed_plan(request, context, clock, None if held is None else held.captured)
    if held is not None:
        timings["capture"] = held.capture_seconds
    plan = _waiting(plan, captured, waiting or {})
    rewritten = held.step if held is not None and not waiting else None
    return finish_step(captured, plan, context, request.device, context.config.compile, timings, rewritten)


def finish_step(
    captured: CapturedGraph,
    plan: ShardingPlan,
    context: StageContext,
    device: torch.device,
    compiles: bool,
    timings: dict[str, float] | None = None,
    rewritten: RewrittenStep | None = None,
) -> CompiledStep:
    """The stages after the plan, which all ranks have agreed on; ``timings`` are those of the stages before.

    Where passes have ``rewritten`` the step already, that is taken.

    Raises:
        ConfigError: the plan does not fit the mesh.
        PassError: ranks have different settings, or their graphs came out different.
    """
    timings = {} if timings is None else timings
    clock = _clock(captured.name, timings, context.progress)
    artifacts = ArtifactWriter(context.config.dump_dir if context.mesh.device_mesh.get_rank() == 0 else None)
    costs = cost_model(context.config, context.mesh, context.control, context.warn_once)
    if rewritten is None:
        rewritten = _applied(captured, plan, context, costs, artifacts)
    timings.update(rewritten.timings)
    partitioned, passes = rewritten.partitioned, rewritten.passes
    for message in rewritten.warnings:
        context.warn_once(message)
    check_same_order(partitioned, context.control)
    report = make_report(captured, partitioned, plan, passes, timings, context.mesh)
    report = replace(report, notes=(*report.notes, *plan.notes))
    with clock("predict"):
        report = with_predictions(report, captured, partitioned, costs, context.mesh.axes_by_group())
        context.found.check_memory(captured, plan, report)
    if context.config.explain is not None and captured.has_backward:
        with clock("explain"):
            report = replace(report, explanation=_explained(captured, plan, context, context.config.explain))
    _dump(artifacts, captured, partitioned, report)
    if artifacts.writes:
        spec = plan.found or context.plan
        artifacts.record(f"{captured.name}/plan", plan_document(captured, plan, spec, context.mesh))
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


def _applied(
    captured: CapturedGraph,
    plan: ShardingPlan,
    context: StageContext,
    costs: CostModel,
    artifacts: ArtifactWriter,
) -> RewrittenStep:
    """The stages ``apply`` and ``passes``, with the partition; every rank calls it.

    Raises:
        PassError: ranks have different settings, or their graphs came out different.
    """
    timings: dict[str, float] = {}
    warnings: list[str] = []
    clock = _clock(captured.name, timings, context.progress)
    error: Exception | None = None
    sharded: ShardedGraph | None = None
    try:
        with clock("apply"):
            sharded = lower_graph(captured, plan, context.mesh.ordered_axis)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    assert sharded is not None
    with clock("passes"):
        heard = replace(context, warn=warnings.append, told=set())
        partitioned, passes = _rewritten(sharded, heard, costs, artifacts)
    return RewrittenStep(partitioned=partitioned, passes=passes, warnings=tuple(warnings), timings=timings)


def _explained(captured: CapturedGraph, plan: ShardingPlan, context: StageContext, pattern: str) -> Explanation:
    """Why what ``pattern`` matches is placed so.

    Raises:
        ConfigError: it matches nothing.
    """
    if plan.found is not None and context.found.explain is not None:
        return context.found.explain(pattern)
    return explain_rules(captured, plan, context.plan, pattern)


def step_forecast(captured: CapturedGraph, plan: ShardingPlan, context: StageContext, costs: CostModel) -> Forecast:
    """What a planned step takes once passes have rewritten it; every rank calls it, and is told what rank 0 finds.

    Raises:
        AutoParallelError: some rank cannot rewrite it.
    """
    silent = replace(context, progress=StageProgress())
    step = _applied(captured, plan, silent, costs, ArtifactWriter(None))
    error: Exception | None = None
    forecast: Forecast | None = None
    try:
        forecast = forecast_of(captured, plan, step.partitioned, costs, context.found.state)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    told = context.control.gather((forecast, context.config.dump_dir is None))
    first: Forecast = told[0][0]
    # What is to be dumped is made once more, with its passes' graphs.
    return replace(first, step=step) if all(is_quiet for _, is_quiet in told) else first


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


def _rewritten(
    sharded: ShardedGraph, context: StageContext, costs: CostModel, artifacts: ArtifactWriter
) -> tuple[PartitionedGraph, tuple[PassReport, ...]]:
    """Passes over the joint graph, the partition, passes over what it made."""
    config, groups = context.config, AxesByGroup(context.mesh)
    keeps = sharded.has_backward and _keeps_gradients(sharded.name, context)
    error: Exception | None = None
    try:
        partitioned, reports, room_bytes = _partitioned(sharded, context, groups, artifacts, costs, keeps)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    check_same_start(partitioned, _settings(config, costs), context.control)
    around = partial(surroundings_of, partitioned, room_bytes=room_bytes)
    backend = _backend(context.mesh, costs)
    passes = split_passes(
        _bucket_limit(config, costs),
        joint_groups(context.mesh),
        costs,
        around,
        _decompose_options(config, backend),
        backend,
        config.disabled_passes,
    )
    told: dict[str, tuple[PassReport, ...]] = {}
    # The backward first: the forward may take as much memory as it does.
    for half, rewritten in reversed(partitioned.graphs().items()):
        name = f"{sharded.name}.{half}"
        told[half] = run_passes(
            rewritten, name, passes, groups, artifacts, config.disabled_passes, context.progress.advance
        )
    return partitioned, (*reports, *(report for half in partitioned.graphs() for report in told[half]))


def _keeps_gradients(name: str, context: StageContext) -> bool:
    """All ranks reckon alike, though one of them may have a hook that looks at gradients."""
    error: Exception | None = None
    keeps = True
    try:
        keeps = context.keeps_gradients(name)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    return context.control.any([keeps])[0]


def _partitioned(
    sharded: ShardedGraph,
    context: StageContext,
    groups: AxesByGroup,
    artifacts: ArtifactWriter,
    costs: CostModel,
    keeps_gradients: bool,
) -> tuple[PartitionedGraph, tuple[PassReport, ...], int]:
    """Passes over the joint graph and the partition; with the bytes that it would take without some of them."""
    config, policy = context.config, context.found.policy or context.checkpointing
    partition = Partitioning(sharded, config.reshard_after_forward, policy, keeps_gradients)
    reports = run_passes(
        sharded.graph_module,
        sharded.name,
        joint_passes(sharded.inputs, sharded.outputs, _chunk_options(config), costs, partition.memory),
        groups,
        artifacts,
        config.disabled_passes,
        context.progress.advance,
    )
    return partition.partitioned(context.warn_once), reports, partition.first_bytes


def _settings(config: EngineConfig, costs: CostModel) -> dict[str, object]:
    """What passes depend on besides the graphs, as all ranks can compare it."""
    return {
        "disabled_passes": sorted(config.disabled_passes),
        "bucket_mb": config.bucket_mb,
        "decompose_matmuls": config.decompose_matmuls,
        "loss_chunks": config.loss_chunks,
        "hardware or ranks_per_node": costs.hardware,
        "reshard_after_forward": config.reshard_after_forward,
    }


def _backend(mesh: ParallelMesh, costs: CostModel) -> str:
    """What process groups talk through, or would: a fake world is planned for what the hardware has."""
    return costs.hardware.backend if mesh.backend == "fake" else mesh.backend


def _decompose_options(config: EngineConfig, backend: str) -> DecomposeOptions:
    spec = config.decompose_matmuls
    return DecomposeOptions(when=spec.when, order=spec.order, depth=spec.depth, backend=backend)


def _chunk_options(config: EngineConfig) -> ChunkOptions:
    return ChunkOptions(chunks=None if config.loss_chunks == AUTO else int(config.loss_chunks))


def _bucket_limit(config: EngineConfig, costs: CostModel) -> BucketLimit:
    """Bytes that one launch may move: what the user allows, or the size at which latency is a twentieth of its time."""
    if config.bucket_mb is not None:
        most = int(config.bucket_mb * 1e6)
        return lambda kind, group: most
    return lambda kind, group: costs.saturating_bytes(kind, group, 0.95) if group in costs.groups else DEFAULT_BYTES


Clock = Callable[[str], contextlib.AbstractContextManager[None]]


def _clock(graph: str, timings: dict[str, float], progress: StageProgress) -> Clock:
    @contextlib.contextmanager
    def clock(stage: str) -> Iterator[None]:
        with progress.stage(f"{stage} {graph}") as running:
            yield
        timings[stage] = running.seconds

    return clock


def _agreed_plan(
    request: StepRequest, context: StageContext, clock: Clock, captured: CapturedGraph | None = None
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
    """The plan of the file that the plan was read from, if that was made for this step; else a new one."""
    spec = context.plan
    document = read_plan(spec.file) if spec.file is not None else None
    if document is not None and document["graph"] == captured.name:
        return restore_plan(document, captured, spec, context.mesh)
    found = context.found.plan_of(captured, context.config.plan, context.mesh)
    if found is not None:
        return found
    try:
        plan = make_plan(captured, spec, context.mesh, context.warn)
        # What was found for all calls of modules together is told with each of them.
        return replace(plan, notes=(*plan.notes, *context.found.notes)) if captured.local else plan
    except InfeasiblePlanError as error:
        if context.found.spec is None:
            raise
        # Nobody wrote the rules: what was found for one step may not do for another.
        context.warn_once(
            f"plan auto: {captured.name} computes with whole parameters, gathered where they are used, because it "
            f"cannot with those that were cut for the training step ({error})"
        )
        return make_plan(captured, spec, context.mesh, context.warn, computes_whole=True)


def _dump(
    artifacts: ArtifactWriter, captured: CapturedGraph, partitioned: PartitionedGraph, report: PlanReport
) -> None:
    artifacts.graph(f"{captured.name}/captured", captured.graph_module)
    artifacts.graph(f"{captured.name}/forward", partitioned.forward)
    if partitioned.backward is not None:
        artifacts.graph(f"{captured.name}/backward", partitioned.backward)
    artifacts.record(f"{captured.name}/report", report.as_json())
