"""``activation_checkpointing="auto"``: once a policy for all blocks fits, a plan is found that recomputes less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.compile import partition_graph, saved_values
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import predict_step_memory
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.pipeline.fastest_plan import RewrittenStep
from lightning_autoparallel.pipeline.rank_memory import may_be_spared_bytes
from lightning_autoparallel.pipeline.recomputed_kinds import lighter_policy

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext

CHECKPOINTING = ("none", "selective", "layer:2", "full")  # what ``auto`` tries for all blocks, in this order


def find_lighter(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    known: str,
    step: RewrittenStep | None,
    find_within: Callable[[str], RewrittenStep | None],
    budget_bytes: float,
) -> RewrittenStep | None:
    """What passes make of a plan that recomputes less, each kind of block by a policy of its own, if it is faster.

    With the policy ``known`` for all blocks one was found that fits, and passes made ``step`` of it: that stays where
    none is. ``find_within`` finds the plan with a policy. First a policy is tried with which it fits if parameters are
    shared out over all ranks, then one with which it fits where they lie.
    """
    found, tried = context.found, {known}
    for shared_out in (True, False):
        policy = _policy(captured, context, costs, known, budget_bytes, shared_out)
        if policy is None or policy in tried:
            continue
        tried.add(policy)
        as_known = dict(vars(found))
        try:
            other = find_within(policy)
            before_us, after_us = as_known["predicted_us"], found.predicted_us
            if before_us is not None and after_us is not None and after_us < before_us:
                return other
        except AutoParallelError as error:  # on all ranks alike: mostly, passes make more of it than was reckoned
            context.progress.advance(f"not recomputing {policy}: {error}")
        vars(found).update(as_known)
    return step


def _policy(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    known: str,
    budget_bytes: float,
    shared_out: bool,
) -> str | None:
    """What rank 0 would try; every rank calls it."""
    found, error, policy = context.found, None, None
    try:
        plan = found.plan_of(captured, context.config.plan, context.mesh)
        assert plan is not None
        again = context.config.reshard_after_forward
        sharded = lower_graph(captured, plan, context.mesh.ordered_axis)

        def peak_with(each: str) -> float:
            return predict_step_memory(partition_graph(sharded, again, each)).peak_bytes

        room_bytes = budget_bytes / (1 + (costs.hardware.reserved_share or 0.0)) - found.predicted_bytes
        if shared_out:
            room_bytes += may_be_spared_bytes(captured, plan, found.state, context.mesh.device_mesh.size())
        saved_with = partial(saved_values, captured, again)
        policy = lighter_policy(captured, plan, costs, CHECKPOINTING, known, saved_with, peak_with, room_bytes)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    context.control.raise_together(error)
    told: str | None = context.control.gather(policy)[0]
    return told
