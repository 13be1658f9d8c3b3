"""``activation_checkpointing="auto"``: once a policy for all blocks fits, a plan is found that recomputes less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.compile import partition_graph, saved_values
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import predict_step_memory
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.pipeline.fastest_plan import RewrittenStep, weight_of
from lightning_autoparallel.pipeline.rank_memory import may_be_spared_bytes
from lightning_autoparallel.pipeline.recomputed_kinds import combinations, first_that_fits
from lightning_autoparallel.torch_compat.tracing import collection_paused

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext

CHECKPOINTING = ("none", "selective", "layer:2", "full")  # what ``auto`` tries for all blocks, in this order


def find_lighter(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    place: int,
    step: RewrittenStep | None,
    find_within: Callable[[str], RewrittenStep | None],
    budget_bytes: float,
) -> RewrittenStep | None:
    """What passes make of a plan that recomputes less, each kind of block by a policy of its own, if it is faster.

    With the policy of ``CHECKPOINTING`` at ``place`` for all blocks one was found that fits, and passes made ``step``
    of it: that stays where none is, or where one cannot be made. ``find_within`` finds the plan with a policy.
    """
    found = context.found
    if found.predicted_us is None:
        return step
    for policy in _policies(captured, context, costs, place, budget_bytes):
        as_known = dict(vars(found))
        try:
            other = find_within(policy)
            if found.predicted_us is not None and _weighed_us(vars(found)) < _weighed_us(as_known):
                return other
        except Exception as error:  # mostly, passes make more of it than was reckoned: all ranks know
            lost = isinstance(error, (MemoryError, dist.DistError))
            is_ours = isinstance(error, AutoParallelError)
            if lost or not (is_ours or context.control.agrees(f"recomputing {policy} fails")):
                raise
            context.progress.advance(f"not recomputing {policy}: {error}")
        vars(found).update(as_known)
    return step


def _policies(
    captured: CapturedGraph, context: StageContext, costs: CostModel, place: int, budget_bytes: float
) -> tuple[str, ...]:
    """What rank 0 would try; every rank calls it. Where one cannot say, nothing is tried."""
    error: Exception | None = None
    policies: tuple[str, ...] = ()
    try:
        with collection_paused():
            policies = _that_should_fit(captured, context, costs, place, budget_bytes)
    except Exception as caught:  # of an unknown time, say: what was found is as good as before
        error = caught
    told: list[tuple[tuple[str, ...], str | None]] = context.control.gather((policies, error and str(error)))
    return () if any(failed is not None for _, failed in told) else told[0][0]


def _that_should_fit(
    captured: CapturedGraph, context: StageContext, costs: CostModel, place: int, budget_bytes: float
) -> tuple[str, ...]:
    """First what should fit if parameters are shared out over all ranks, then what should where they lie."""
    found, known, refused = context.found, CHECKPOINTING[place], CHECKPOINTING[: place + 1]
    plan = found.plan_of(captured, context.config.plan, context.mesh)
    assert plan is not None
    again, earlier = context.config.gathers_again(plan.keeps_gathered), context.earlier_gradients(captured)
    sharded = lower_graph(captured, plan, context.mesh.ordered_axis)

    @cache
    def peak_with(policy: str) -> float:
        partitioned = partition_graph(sharded, again, policy)
        return predict_step_memory(replace(partitioned, earlier_gradients=earlier)).peak_bytes

    room_bytes = costs.hardware.usable_bytes(budget_bytes - found.predicted_bytes)
    spared_bytes = may_be_spared_bytes(captured, plan, found.state, context.mesh.device_mesh.size())
    ordered = combinations(captured, plan, costs, CHECKPOINTING, known, partial(saved_values, captured, again))
    most_bytes = peak_with(known) + room_bytes
    fitting = [first_that_fits(ordered, peak_with, most, refused) for most in (most_bytes + spared_bytes, most_bytes)]
    return tuple(dict.fromkeys(policy for policy in fitting if policy is not None))


def _weighed_us(found: Mapping[str, Any]) -> float:
    """What the plan that was found takes beside others."""
    return float(found["predicted_us"]) * weight_of(found["answer"].document)
