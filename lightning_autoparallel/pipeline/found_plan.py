"""``plan="auto"`` in a training: the plan is found at its first whole step, and parameters are placed by it then.

Until that they lie in shards over all ranks, which takes least memory; evaluations before the first step compute with
whole ones. Rank 0 solves, and all ranks are told what was found: a solver's time limit ends elsewhere on each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.config import AUTO, PlanRule, PlanSpec, policies_by_kind
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction, PlanReport, ShardingPlan
from lightning_autoparallel.cost import CostModel, HardwareSpec
from lightning_autoparallel.cost.optimizer import ADAMW, OptimizerState
from lightning_autoparallel.errors import AutoParallelError, InfeasiblePlanError, SearchTimeError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.calls_of_step import CallsOfStep
from lightning_autoparallel.pipeline.contest import Contest
from lightning_autoparallel.pipeline.fastest_plan import (
    Answer,
    RewrittenStep,
    alike,
    choice_note,
    fastest,
)
from lightning_autoparallel.pipeline.kept_plan import Question, answer_of, kept, policy_name
from lightning_autoparallel.pipeline.lighter_plan import CHECKPOINTING, find_lighter
from lightning_autoparallel.pipeline.memory_budget import budget_bytes
from lightning_autoparallel.pipeline.not_found import told_of_shards
from lightning_autoparallel.pipeline.predict import cost_model
from lightning_autoparallel.pipeline.progress import Stage
from lightning_autoparallel.pipeline.rank_memory import kept_bytes, most_bytes, read_bytes, saved_bytes, why_over
from lightning_autoparallel.pipeline.read_activations import read_activations
from lightning_autoparallel.pipeline.remedies import Shortfall, TooLargeError, remedies
from lightning_autoparallel.pipeline.same_order import check_same_graph, check_same_settings
from lightning_autoparallel.pipeline.solved_plans import solved
from lightning_autoparallel.pipeline.staying import check_staying, staying
from lightning_autoparallel.plan import Activations, first_spec, kept_plan_of, matching

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext
    from lightning_autoparallel.pipeline.step_calls import StepCall


_A_LITTLE_MORE, _A_LITTLE_LESS = 1.01, 0.999  # than what is missing, or was there: then it ends
_ROUNDS = 4


class OverBudgetError(InfeasiblePlanError):
    """A plan that was found turns out to take ``taken_bytes``, more than a rank may use."""

    taken_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HeldStep:
    """What a ``request`` was captured as while its plan was found, and what passes made of that, if they were asked.

    ``seconds`` are those of the stages that this took.
    """

    request: StepRequest
    captured: CapturedGraph
    seconds: Mapping[str, float]
    step: RewrittenStep | None


@dataclass
class FoundPlan:
    """What has taken the place of ``auto``: the ``answer`` has rules for every step, and the placements of one.

    ``policy`` is what its backward recomputes. A rank's allocator may hold ``budget_bytes``; for what was found it
    should hold ``predicted_bytes`` or more, ``predicted_us`` a step, and passes made it ``missing_bytes`` more in
    ``rounds`` plans, which took ``seconds`` by stage.
    It is for a module whose parameters have these ``shapes``.
    ``state`` is what optimizers keep, with ``why_unknown`` where that is a guess; ``held`` is what the next capture may
    take as it is. ``calls`` are those of modules, in a training that runs no whole step.
    """

    answer: Answer | None = None
    policy: str | CheckpointFunction | None = None
    budget_bytes: float = math.inf
    predicted_bytes: float = 0.0
    predicted_us: float | None = None
    missing_bytes: float = 0.0
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    is_open: bool = True
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    question: Question | None = None
    pins: tuple[PlanRule, ...] = ()
    from_checkpoint: Mapping[str, Any] | None = None
    held: HeldStep | None = None
    state: OptimizerState = ADAMW
    why_unknown: str | None = None
    calls: CallsOfStep = field(default_factory=CallsOfStep)

    @property
    def spec(self) -> PlanSpec | None:
        """Base and rules of what was found."""
        return None if self.answer is None else self.answer.spec

    def note(self, call: StepCall, captured: CapturedGraph) -> None:
        """A captured call runs; those of modules are kept until the plan is found."""
        if self.is_open and call.local and call.trains:
            self.calls.add(captured)

    def take_held(self, request: StepRequest) -> HeldStep | None:
        """What is known of this very request, once: then it is let go of, like that of any other."""
        held, self.held = self.held, None
        return held if held is not None and held.request is request else None

    def asked(self, configured: PlanSpec) -> PlanSpec:
        """What is asked for, with what must stay where it is."""
        return replace(configured, rules=(*configured.rules, *self.pins))

    @property
    def for_checkpoints(self) -> dict[str, Any] | None:
        """What a checkpoint is to hold of the plan; None where none was found."""
        if self.answer is None or self.question is None:
            return self.from_checkpoint if self.from_checkpoint is None else dict(self.from_checkpoint)
        return kept(self.question, self.answer)

    def is_awaited(self, context: StageContext) -> bool:
        """Whether a plan is yet to be found, at a whole step or after one that runs its own Python.

        For one rank that is what is recomputed, and whether it fits, where either was asked for.
        """
        config = context.config
        asks = config.activation_checkpointing == AUTO or config.memory_budget_gib is not None
        return self.is_open and config.plan.base == AUTO and (asks or context.mesh.device_mesh.size() > 1)

    def is_due(self, context: StageContext, call: StepCall) -> bool:
        """Whether a call that is about to be captured is the one that the plan is found for."""
        return self.is_awaited(context) and call.training and not call.local

    def check_memory(
        self, captured: CapturedGraph, plan: ShardingPlan, report: PlanReport, hardware: HardwareSpec
    ) -> None:
        """Whether the plan that was found fits with what passes have made of its step.

        Raises:
            OverBudgetError: it does not; all ranks raise it.
        """
        if plan.found is None or report.predicted_peak_bytes is None:
            return
        taken_bytes = hardware.reserved_bytes(kept_bytes(captured, plan, self.state) + report.predicted_peak_bytes)
        if taken_bytes <= self.budget_bytes or not self.rounds:
            return
        error = OverBudgetError(
            f"plan auto: passes make the step take {taken_bytes / 2**30:.3g} GiB of a rank, of "
            f"{self.budget_bytes / 2**30:.3g} that it may use, in each of {self.rounds} plans: take fewer rows per rank"
        )
        error.taken_bytes = taken_bytes
        raise error

    def reopen(self, over: OverBudgetError) -> None:
        """Another plan is to be found, that leaves what passes took of this one.

        Raises:
            OverBudgetError: that did not do a few times.
        """
        if self.rounds >= _ROUNDS:
            raise over
        more_bytes = max(over.taken_bytes - self.predicted_bytes, over.taken_bytes - self.budget_bytes)
        self.missing_bytes = max(self.missing_bytes, more_bytes) * _A_LITTLE_MORE
        self.is_open = True

    def remember(self, module: nn.Module) -> None:
        """What was found is for this module."""
        self.shapes = _shapes(module)

    def forget_others(self, module: nn.Module) -> None:
        """What was found for a module of other parameters is nothing for this one; what was not is looked for anew."""
        if self.answer is None:
            self.missing_bytes, self.rounds, self.is_open = 0.0, 0, True
        elif self.shapes != _shapes(module):
            self.answer = self.policy = None
            self.missing_bytes, self.rounds, self.is_open = 0.0, 0, True
            self.question = self.from_checkpoint = None

    def in_force(self, configured: PlanSpec, mesh: ParallelMesh) -> PlanSpec:
        """The plan that steps are made by: as configured, or for ``auto`` what stands in its place now."""
        if configured.base != AUTO:
            return configured
        return first_spec(configured, mesh) if self.answer is None else self.answer.spec

    def plan_of(self, captured: CapturedGraph, configured: PlanSpec, mesh: ParallelMesh) -> ShardingPlan | None:
        """The plan that was found for this very graph; None for any other."""
        answer = self.answer
        plan = None if answer is None else kept_plan_of(answer.document, captured, answer.spec, mesh)
        if answer is None or plan is None:
            return None
        return replace(plan, name=configured.name, found=answer.spec, notes=answer.notes, solved=answer.solved)


def find_plan(
    context: StageContext,
    request: StepRequest,
    followers: Mapping[str, tuple[str, ...] | None] = MappingProxyType({}),
    layouts: Mapping[str, ParameterLayout] = MappingProxyType({}),
    optimizers: tuple[OptimizerState, str | None] = (ADAMW, None),
) -> None:
    """Find the plan for a step, where ranks have agreed that they are about to capture it; every rank calls it alike.

    ``followers`` are what moves with each parameter. It is left where ``layouts`` have it if any rank says None, or
    says otherwise than another: only what every rank has can be moved. ``optimizers`` are what rank 0's keep, or why
    that is not known.

    Of several that the solver thinks good, it is the one that is fastest after the passes. What activations take is
    known then: where that leaves less room for parameters than they have, or recomputing more would leave more, it is
    planned again. Where the solver finds nothing in its time, steps are planned as before a plan is found.

    Raises:
        CaptureError: the step cannot be captured whole, or is another one on another rank.
        InfeasiblePlanError: there is no plan that fits the memory of a rank.
    """
    error: Exception | None = None
    captured: CapturedGraph | None = None
    try:
        with context.progress.stage(f"capture {request.name}, to find its plan") as capturing:
            captured = capture_step(request)
        if context.config.explain is not None:
            matching(captured, context.config.explain)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    assert captured is not None
    with context.progress.stage(f"find a plan for {captured.name}") as finding:
        try:
            step = find_plan_of(captured, context, followers, layouts, optimizers)
        except SearchTimeError as late:  # on all ranks
            step = None
            context.warn(told_of_shards(context, f"in time for {request.name}", str(late)))
    context.found.held = HeldStep(
        request=request, captured=captured, seconds=_seconds(context.found, capturing, finding, step), step=step
    )


def _seconds(found: FoundPlan, capturing: Stage, finding: Stage, step: RewrittenStep | None) -> dict[str, float]:
    """Of all rounds; stages of the ``step`` that was taken are told with the others."""
    told = 0.0 if step is None else sum(step.timings.values())
    before = found.seconds if found.rounds > 1 else {}
    found.seconds = {
        "capture": before.get("capture", 0.0) + capturing.seconds,
        "find": before.get("find", 0.0) + finding.seconds - told,
    }
    return dict(found.seconds)


def find_plan_of(
    captured: CapturedGraph,
    context: StageContext,
    followers: Mapping[str, tuple[str, ...] | None],
    layouts: Mapping[str, ParameterLayout],
    optimizers: tuple[OptimizerState, str | None],
    unread_bytes: float = 0.0,
) -> RewrittenStep | None:
    """As ``find_plan``, for a step that every rank has captured; what passes made of it, where they were asked.

    A rank has ``unread_bytes`` of parameters that the step does not read, alive beside it.
    """
    check_same_graph(captured, None, context.control)
    costs = cost_model(context.config, context.mesh, context.control, context.warn_once)
    check_same_settings("before a plan is found", _settings(context, costs), context.control)
    found = context.found
    found.budget_bytes = budget_bytes(context.config, context.mesh, costs.hardware, context.control)
    found.missing_bytes += costs.hardware.reserved_bytes(unread_bytes)
    budget = max(found.budget_bytes - found.missing_bytes, 1.0)
    policies = CHECKPOINTING if context.config.activation_checkpointing == AUTO else (context.checkpointing,)
    before = found.answer, found.policy
    found.is_open, found.rounds = False, found.rounds + 1
    found.pins = staying(context, followers, layouts)
    (state, found.why_unknown), micro_batches = context.control.told_by_first(
        (optimizers, context.micro_batches(captured))
    )
    found.state = replace(state, micro_batches=micro_batches)
    refused: dict[str, str] = {}  # by policy
    shortfall: Shortfall | None = None
    kept = _kept_policy(captured, context, costs) if len(policies) > 1 else None
    within = partial(_find_within, captured, context, costs, budget_bytes=budget, layouts=layouts)
    for policy in policies if kept is None else (kept, *(each for each in policies if each != kept)):
        try:
            step = within(policy)
            if policy in (kept, policies[0]):
                return step
            return find_lighter(captured, context, costs, policies.index(policy), step, within, budget)
        except SearchTimeError:  # another policy would take as long
            found.answer = found.policy = None
            raise
        except Exception as error:
            # Parameters lie as they did.
            found.answer, found.policy = before
            if not isinstance(error, AutoParallelError if policy == kept else InfeasiblePlanError):
                found.is_open, found.rounds = True, found.rounds - 1  # in forward mode it is found for its calls
                raise
            refused[policy_name(policy)] = str(error)
            shortfall = error.shortfall if isinstance(error, TooLargeError) else None
    said = [f"with activation_checkpointing {policy!r}: {why}" for policy, why in refused.items()]
    if len(said) > 1 and len(set(refused.values())) == 1:  # whatever is recomputed
        said = list(refused.values())[:1]
    if shortfall is not None:
        said.append(_what_would_do(shortfall, context, policies[-1]))
    raise InfeasiblePlanError("; ".join([*said, *filter(None, [found.why_unknown])]))


def _kept_policy(captured: CapturedGraph, context: StageContext, costs: CostModel) -> str | None:
    """What the plan of a checkpoint recomputes, where that was left open and is again, as rank 0 has it."""
    found, held, policy = context.found, context.found.from_checkpoint, None
    if held is not None and found.rounds == 1:
        try:
            asked = str(held["question"]["policy"])
            if asked in CHECKPOINTING or policies_by_kind(asked):
                policy = asked if answer_of(held, _question(context, costs, asked), captured) is not None else None
        except (KeyError, TypeError, ValueError, AutoParallelError):  # no plan of ours: another is found
            policy = None
    told: str | None = context.control.told_by_first(policy)
    return told


def _question(context: StageContext, costs: CostModel, policy: str | CheckpointFunction) -> Question:
    found, config = context.found, context.config
    asked, recomputing = found.asked(config.plan), config.activation_checkpointing
    resharding = config.reshard_after_forward
    return Question.of(asked, context.mesh, costs, found.budget_bytes, policy, recomputing, resharding)


def _what_would_do(shortfall: Shortfall, context: StageContext, policy: str | CheckpointFunction) -> str:
    """Changes after which the leanest plan would fit, which recomputes as ``policy`` says."""
    stronger = CHECKPOINTING[CHECKPOINTING.index(policy) + 1 :] if policy in CHECKPOINTING else ("full",)
    activations_with = partial(read_activations, shortfall.captured, context.config.gathers_again())
    text = remedies(shortfall, context.mesh.data_parallel_size, stronger, activations_with)
    return text if context.config.gathers_again() else f"{text}; reshard_after_forward=True takes less, too"


def _settings(context: StageContext, costs: CostModel) -> dict[str, object]:
    """What is found depends on them, and how often ranks talk meanwhile."""
    config = context.config
    return {
        "hardware or ranks_per_node": costs.hardware,
        "memory_budget_gib": config.memory_budget_gib,
        "activation_checkpointing": policy_name(config.activation_checkpointing),
        "plan": config.plan.as_written(),
    }


def _find_within(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    policy: str | CheckpointFunction,
    budget_bytes: float,
    layouts: Mapping[str, ParameterLayout],
) -> RewrittenStep | None:
    """The plan with this policy; what passes make of its step, where they were asked.

    Raises:
        InfeasiblePlanError: there is none that fits; a TooLargeError where the passes say so.
    """
    found, room_bytes = context.found, costs.hardware.usable_bytes(budget_bytes)
    activations = _activations(captured, context, policy)
    seen: list[Mapping[str, Any]] = []
    over: TooLargeError | None = None
    found.policy, found.predicted_us = policy, None
    found.question = _question(context, costs, policy)
    held = found.from_checkpoint if found.rounds == 1 else None  # later the passes have refused it
    while True:
        context.progress.advance(f"recomputing {policy}, {room_bytes / 2**30:.3g} GiB for what stays")
        try:
            answers = _found(captured, context, costs, room_bytes, held, activations)
        except InfeasiblePlanError as error:
            raise (over or error) from error
        held = None
        if over is not None and answers[0].document in seen:  # what calls do, too, beside where parameters lie
            # The solver's reckoning is not the passes': another plan that takes less by its own may fit.
            if answers[0].stays_bytes >= room_bytes:
                raise over
            room_bytes = answers[0].stays_bytes * _A_LITTLE_LESS
            continue
        plans = [_take(found, answer, captured, context, layouts) for answer in answers]
        most = kept_bytes(captured, plans[0], found.state) + most_bytes(captured)
        found.predicted_bytes = costs.hardware.reserved_bytes(most)
        if len(plans) == 1 and found.predicted_bytes <= budget_bytes:
            return None
        contest = Contest(captured, context, costs, budget_bytes)
        contenders = contest.contenders(list(zip(answers, plans, strict=True)))
        taken = fastest(contenders, budget_bytes, alike(costs.hardware))
        if taken is not None:
            found.predicted_bytes = costs.hardware.reserved_bytes(taken.lean_bytes)
            found.predicted_us = taken.forecast.time_us
            gib, of_gib = taken.needed_bytes / 2**30, budget_bytes / 2**30
            note = f"plan auto: {gib:.3g} of {of_gib:.3g} GiB on a rank, recomputing {policy}"
            notes = (*taken.answer.notes, *choice_note(contenders, taken, budget_bytes), *contest.left_out, note)
            found.answer = replace(taken.answer, notes=notes)
            return taken.forecast.step
        seen += [answer.document for answer in answers]
        leanest = min(contenders, key=lambda each: each.needed_bytes)
        plan = plans[answers.index(leanest.answer)]
        saved = saved_bytes(captured, plan, activations.saved)
        shortfall = Shortfall(
            captured=captured,
            plan=plan,
            needed_bytes=leanest.needed_bytes,
            kept_bytes=leanest.kept_bytes,
            activations=activations,
            hardware=costs.hardware,
            budget_bytes=budget_bytes,
            gathered_again=context.config.gathers_again(plan.keeps_gathered),
            add_up=context.earlier_gradients(captured) == "kept",
        )
        over = TooLargeError(why_over(captured, leanest, saved, costs.hardware, budget_bytes), shortfall)
        if room_bytes < answers[0].stays_bytes < math.inf:  # what the solver says where nothing fits, in less room, too
            raise over
        stays_bytes = leanest.answer.stays_bytes
        if math.isinf(stays_bytes):  # no solver has looked at it
            stays_bytes = leanest.kept_bytes + read_bytes(captured, plan, activations)
        over_bytes = costs.hardware.usable_bytes(leanest.needed_bytes - budget_bytes)
        room_bytes = min(room_bytes, stays_bytes) - over_bytes * _A_LITTLE_MORE
        if room_bytes < 1:
            raise over


def _activations(captured: CapturedGraph, context: StageContext, policy: str | CheckpointFunction) -> Activations:
    """What the backward will read, saved or recomputed; every rank calls it, and where that fails on one, all raise."""
    error: Exception | None = None
    activations = Activations()
    try:
        activations = read_activations(captured, context.config.gathers_again(), policy)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    return activations


def _take(
    found: FoundPlan,
    answer: Answer,
    captured: CapturedGraph,
    context: StageContext,
    layouts: Mapping[str, ParameterLayout],
) -> ShardingPlan:
    """The plan of an answer, which is then the one that was found."""
    found.answer = answer
    plan = found.plan_of(captured, context.config.plan, context.mesh)
    assert plan is not None
    check_staying(plan, found.pins, layouts)
    return plan


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _found(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    room_bytes: float,
    held: Mapping[str, Any] | None,
    activations: Activations,
) -> tuple[Answer, ...]:
    error: Exception | None = None
    found: tuple[Answer, ...] = ()
    if dist.get_rank() == 0:
        try:
            assert context.found.question is not None
            known = answer_of(held, context.found.question, captured)
            found = (known,) if known is not None else solved(captured, context, costs, room_bytes, activations)
        except AutoParallelError as ours:
            error = ours
        except Exception as other:  # not taken for a step that cannot be captured, which would run without a plan
            error = AutoParallelError(f"plan 'auto' failed ({type(other).__name__}: {other}): name a plan instead")
            error.__cause__ = other
    context.control.raise_together(error)
    told: tuple[Answer, ...] = context.control.told_by_first(tuple(one.to_tell() for one in found))
    return found or told
