"""``plan="auto"`` in a training: the plan is found at its first whole step, and parameters are placed by it then.

Until that they lie in shards over all ranks, which takes least memory; evaluations before the first step compute with
whole ones. Rank 0 solves, and all ranks are told what was found: a solver's time limit ends elsewhere on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.config import AUTO, PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.errors import AutoParallelError, StepFailedError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.predict import cost_model
from lightning_autoparallel.plan import first_spec, is_of_graph, make_plan, plan_document, restore_plan

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext
    from lightning_autoparallel.pipeline.step_calls import StepCall


@dataclass
class FoundPlan:
    """What has taken the place of ``auto``: rules for every step, and the placements of the step it was found for."""

    spec: PlanSpec | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def is_due(self, context: StageContext, call: StepCall) -> bool:
        """Whether a call that is about to be captured is the one that the plan is found for."""
        is_open = self.spec is None and context.config.plan.base == AUTO
        return is_open and call.training and not call.local and context.mesh.device_mesh.size() > 1

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


def find_plan(context: StageContext, request: StepRequest) -> None:
    """Find the plan for a step, where ranks have agreed that they are about to capture it; every rank calls it alike.

    Raises:
        CaptureError: the step cannot be captured whole.
        InfeasiblePlanError: there is no plan.
    """
    error: AutoParallelError | None = None
    captured: CapturedGraph | None = None
    try:
        captured = capture_step(request)
    except AutoParallelError as ours:
        error = ours
    except Exception as other:
        error = StepFailedError(f"{type(other).__name__}: {other}")
        error.__cause__ = other
    context.control.raise_together(error)
    assert captured is not None
    context.found.spec, context.found.document, context.found.notes = _found(captured, context)


def _found(captured: CapturedGraph, context: StageContext) -> tuple[PlanSpec, Mapping[str, Any], tuple[str, ...]]:
    costs = cost_model(context.config, context.mesh, context.control)
    error: Exception | None = None
    found: tuple[Any, ...] = ()
    if dist.get_rank() == 0:
        try:
            plan = make_plan(captured, context.config.plan, context.mesh, context.warn, costs=costs)
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
