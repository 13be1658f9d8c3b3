"""``plan="auto"`` in a training: the plan is found at its first whole step, and parameters are placed by it then.

Until that they lie in shards over all ranks, which takes least memory; evaluations before the first step compute with
whole ones. Rank 0 solves, and all ranks are told what was found: a solver's time limit ends elsewhere on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.config import AUTO, PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction, Explanation, PlanReport, ShardingPlan
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.errors import AutoParallelError, InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.predict import cost_model
from lightning_autoparallel.plan import first_spec, is_of_graph, make_plan, matching, plan_document, restore_plan

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext
    from lightning_autoparallel.pipeline.step_calls import StepCall


CHECKPOINTING = ("none", "selective", "layer:2", "full")  # what ``auto`` tries, the least recomputation first
_USABLE = 0.9  # of a device's memory
_COPIES, _WITH_GRADIENTS = 3, 4 / 3  # AdamW keeps two moments of a parameter; a gradient is as large
_A_LITTLE_MORE = 1.01  # than what is missing: then it ends
_ROUNDS = 4
StepPeak = Callable[[CapturedGraph, ShardingPlan, "StageContext"], float]


class OverBudgetError(InfeasiblePlanError):
    """A plan that was found turns out to take ``taken_bytes``, more than a rank may use."""

    taken_bytes: float = 0.0


@dataclass
class FoundPlan:
    """What has taken the place of ``auto``: rules for every step, and the placements of the step it was found for.

    ``policy`` is what its backward recomputes. A rank may use ``budget_bytes``; what was found should take
    ``predicted_bytes``, and passes made it ``missing_bytes`` more, in so many ``rounds``. It is for a module whose
    parameters have these ``shapes``. ``explain`` says why it is so, where that was asked for.
    """

    spec: PlanSpec | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    policy: str | CheckpointFunction | None = None
    budget_bytes: float = math.inf
    predicted_bytes: float = 0.0
    missing_bytes: float = 0.0
    rounds: int = 0
    is_open: bool = True
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    explain: Callable[[str], Explanation] | None = None

    def is_due(self, context: StageContext, call: StepCall) -> bool:
        """Whether a call that is about to be captured is the one that the plan is found for."""
        is_open = self.is_open and context.config.plan.base == AUTO
        return is_open and call.training and not call.local and context.mesh.device_mesh.size() > 1

    def why_unfound(self, context: StageContext) -> str | None:
        """What to tell of ``auto`` in a training that runs no whole step; None where there is nothing to tell."""
        if self.spec is not None or context.config.plan.base != AUTO:
            return None
        idle = [name for name in context.mesh.active(context.mesh.spec.names) if not name.startswith("dp_")]
        alike = f", and all ranks of {', '.join(idle)} compute the same unless rules say otherwise" if idle else ""
        return (
            "autoparallel: plan 'auto' is found for whole steps, which this training has none of: parameters lie in "
            f"shards over all ranks, gathered where they are used, as plan 'fsdp' has them{alike}"
        )

    def check_memory(self, captured: CapturedGraph, plan: ShardingPlan, report: PlanReport) -> None:
        """Whether the plan that was found fits with what passes have made of its step.

        Raises:
            OverBudgetError: it does not; all ranks raise it.
        """
        if plan.found is None or report.predicted_peak_bytes is None:
            return
        taken_bytes = kept_bytes(captured, plan) + report.predicted_peak_bytes
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
        """What was found for a module of other parameters is nothing for this one."""
        if self.spec is not None and self.shapes != _shapes(module):
            self.spec, self.document, self.notes, self.policy = None, {}, (), None
            self.missing_bytes, self.rounds, self.is_open = 0.0, 0, True

    def in_force(self, configured: PlanSpec, mesh: ParallelMesh) -> PlanSpec:
        """The plan that steps are made by: as configured, or for ``auto`` what stands in its place now."""
        if configured.base != AUTO:
            return configured
        return first_spec(configured, mesh) if self.spec is None else self.spec

    def plan_of(self, captured: CapturedGraph, configured: PlanSpec, mesh: ParallelMesh) -> ShardingPlan | None:
        """The plan that was found for this very graph; None for any other."""
        if self.spec is None or not is_of_graph(self.document, captured):
            return None
        plan = restore_plan(self.document, captured, self.spec, mesh)
        return ShardingPlan(**{**vars(plan), "name": configured.name, "found": self.spec, "notes": self.notes})


def find_plan(context: StageContext, request: StepRequest, step_peak_bytes: StepPeak) -> None:
    """Find the plan for a step, where ranks have agreed that they are about to capture it; every rank calls it alike.

    What its activations take is known once it is planned: where that leaves less room for parameters than they have,
    or recomputing more would leave more, it is planned again.

    Raises:
        CaptureError: the step cannot be captured whole.
        InfeasiblePlanError: there is no plan that fits the memory of a rank.
    """
    error: Exception | None = None
    captured: CapturedGraph | None = None
    try:
        captured = capture_step(request)
        if context.config.explain is not None:
            matching(captured, context.config.explain)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    assert captured is not None
    costs = cost_model(context.config, context.mesh, context.control)
    given = context.config.memory_budget_gib
    found = context.found
    found.budget_bytes = given * 2**30 if given is not None else _USABLE * costs.hardware.memory_bytes
    budget = max(found.budget_bytes - found.missing_bytes, 1.0)
    policies = CHECKPOINTING if context.config.activation_checkpointing == AUTO else (context.checkpointing,)
    before = found.spec, found.document, found.notes, found.policy
    found.is_open, found.rounds = False, found.rounds + 1
    refused: list[str] = []
    for policy in policies:
        try:
            _find_within(captured, context, costs, policy, budget, step_peak_bytes)
            return
        except Exception as error:
            # Parameters lie as they did.
            found.spec, found.document, found.notes, found.policy = before
            if not isinstance(error, InfeasiblePlanError):
                raise
            refused.append(f"with activation_checkpointing {policy!r}: {error}")
    raise InfeasiblePlanError("; ".join(refused))


def _find_within(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    policy: str | CheckpointFunction,
    budget_bytes: float,
    step_peak_bytes: StepPeak,
) -> None:
    """The plan with this policy.

    Raises:
        InfeasiblePlanError: there is none that fits.
    """
    found, room_bytes = context.found, budget_bytes
    found.policy = policy
    while True:
        found.spec, found.document, found.notes = _found(captured, context, costs, room_bytes)
        plan = found.plan_of(captured, context.config.plan, context.mesh)
        assert plan is not None
        kept = kept_bytes(captured, plan)
        found.predicted_bytes = kept + _most_bytes(captured)
        if found.predicted_bytes <= budget_bytes:
            return
        peak = _together(partial(step_peak_bytes, captured, plan, context), context)
        found.predicted_bytes = kept + peak
        reserved = 1 + (costs.hardware.reserved_share or 0.0)
        needed = (kept + peak) * reserved
        if needed <= budget_bytes:
            note = f"plan auto: {needed / 2**30:.3g} of {budget_bytes / 2**30:.3g} GiB on a rank, recomputing {policy}"
            found.notes = (*found.notes, note)
            return
        if peak * reserved >= budget_bytes or room_bytes < 1:
            raise InfeasiblePlanError(
                f"activations, gradients and what is gathered take {peak * reserved / 2**30:.3g} GiB of a rank at the "
                f"step's peak, of {budget_bytes / 2**30:.3g} that it may use: take fewer rows per rank "
                "(accumulate_grad_batches), or have more recomputed"
            )
        room_bytes = min(room_bytes, kept * _WITH_GRADIENTS) - (needed - budget_bytes) * _A_LITTLE_MORE


def _together(action: Callable[[], float], context: StageContext) -> float:
    error: Exception | None = None
    result = 0.0
    try:
        result = action()
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    return result


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def kept_bytes(captured: CapturedGraph, plan: ShardingPlan) -> float:
    """Of parameters, and of two moments of those that are trained, on one rank."""
    trained = {item.name for item in captured.outputs if item.is_parameter_gradient}
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    total = 0.0
    for node, item in zip(nodes, captured.inputs, strict=True):
        if item.kind == "parameter":
            pairs = zip(plan.parameters[item.name], plan.axes, strict=True)
            parts = math.prod(axis.size for placement, axis in pairs if is_shard(placement))
            total += fxn.size_bytes(node.meta["val"]) / parts * (_COPIES if item.name in trained else 1)
    return total


def _most_bytes(captured: CapturedGraph) -> float:
    """More than a step can take: all that it ever makes, at once."""
    nodes = [node for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    made = [value for node in nodes if not fxn.is_getitem(node) for value in fxn.values(node) if value is not None]
    return float(sum(map(fxn.size_bytes, made)))


def _found(
    captured: CapturedGraph, context: StageContext, costs: CostModel, room_bytes: float
) -> tuple[PlanSpec, Mapping[str, Any], tuple[str, ...]]:
    error: Exception | None = None
    found: tuple[Any, ...] = ()
    if dist.get_rank() == 0:
        try:
            asked, mesh = context.config.plan, context.mesh
            explains = context.config.explain is not None
            plan = make_plan(captured, asked, mesh, context.warn, costs=costs, room_bytes=room_bytes, explains=explains)
            context.found.explain = plan.explain
            assert plan.found is not None
            found = plan.found, plan_document(captured, plan, plan.found, context.mesh), plan.notes
        except AutoParallelError as ours:
            error = ours
        except Exception as other:  # not taken for a step that cannot be captured, which would run without a plan
            error = AutoParallelError(f"plan 'auto' failed ({type(other).__name__}: {other}): name a plan instead")
            error.__cause__ = other
    context.control.raise_together(error)
    spec, document, notes = context.control.gather(found)[0]
    return spec, document, notes
