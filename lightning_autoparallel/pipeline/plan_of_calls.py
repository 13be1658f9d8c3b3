"""``plan="auto"`` where steps run their own Python: one plan for all calls of modules that the first step made.

That step computes with parameters that lie in shards over all ranks, uncompiled, as what it captures is captured again
for the plan. What is known after it is which modules are called, how often and on what: their graphs are joined, and
planned as one, under one budget. What the step computes between calls, and moves in between, is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autoparallel.apply import followers
from lightning_autoparallel.capture.joined import join_calls
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.pipeline.found_plan import find_plan_of
from lightning_autoparallel.pipeline.optimizer_state import names_by_id, optimizer_state
from lightning_autoparallel.pipeline.stages import StageContext, step_forecast
from lightning_autoparallel.pipeline.step_calls import StepCall

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.engine import StepEngine


def begin_step(engine: StepEngine, step: int) -> str | None:
    """A training step that runs its own Python begins, after ``step`` steps of optimizers; all ranks call it alike.

    If it is the first one after such a step, the plan is found and parameters move. It is told why none was found:
    then they stay in shards.
    """
    context, found = engine.context, engine.context.found
    if not found.is_awaited(context):
        return None
    calls = found.calls.begin(step)
    if calls is None or engine.deferred.owed:  # gradients that wait cannot move
        return None
    why = _find(engine, calls) if calls else "no call of a module was captured"
    found.is_open = False
    engine.place_anew()
    if why is not None:
        return _told(context, why)
    found.remember(engine.module)
    return None


def _find(engine: StepEngine, calls: Sequence[CapturedGraph]) -> str | None:
    """Find the plan; or why there is none, on all ranks."""
    moving = followers(engine.module, engine.optimizers())
    state = optimizer_state(engine.optimizers(), {**names_by_id(engine.module), **engine.stand_ins()})
    joined = join_calls("training_step", calls)
    try:
        find_plan_of(joined, engine.context, step_forecast, moving, engine.layouts, state)
    except AutoParallelError as error:  # the training goes on as it began
        return str(error)
    except Exception as error:  # of ours, which all ranks have been told of: no reason to end a training that runs
        return f"{type(error).__name__}: {error}"
    return None


def context_of(context: StageContext, call: StepCall) -> StageContext:
    """Where a call is made into a step: what is let go of after the first step, for the plan, is not compiled."""
    if not (call.local and call.training and context.found.is_awaited(context)):
        return context
    return replace(context, config=replace(context.config, compile=False))


def _told(context: StageContext, reason: str) -> str:
    idle = [name for name in context.mesh.active(context.mesh.spec.names) if not name.startswith("dp_")]
    alike = f", and all ranks of {', '.join(idle)} compute the same unless rules say otherwise" if idle else ""
    return (
        "autoparallel: plan 'auto' was not found for a training that runs no whole step: parameters lie in shards over "
        f"all ranks, gathered where they are used, as plan 'fsdp' has them{alike} ({reason})"
    )
