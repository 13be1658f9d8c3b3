"""``plan="auto"`` where steps run their own Python: one plan for all calls of modules that the first step made.

That step computes with parameters that lie in shards over all ranks, uncompiled, as what it captures is captured again
for the plan. What is known after it is which modules are called, how often and on what: their graphs are joined, and
planned as one, under one budget. What the step computes between calls, and moves in between, is not in it. Parameters
that no call reads while autograd records, as those of a frozen teacher, stay in shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import ParameterLayout, followers
from lightning_autoparallel.capture.joined import join_calls
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.cost.optimizer import OptimizerState
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.found_plan import find_plan_of
from lightning_autoparallel.pipeline.not_found import told_of_shards
from lightning_autoparallel.pipeline.optimizer_state import names_by_id, optimizer_state
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.pipeline.staying import left_where_it_is
from lightning_autoparallel.pipeline.step_calls import StepCall

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.engine import StepEngine


def begin_step(engine: StepEngine, step: int, patience: int = 64) -> str | None:
    """A training step that runs its own Python begins, after ``step`` steps of optimizers; all ranks call it alike.

    If it is the first one after such a step, the plan is found and parameters move. It is told why none was found:
    then they stay in shards. That is so, too, where no step of an optimizer is seen in ``patience`` training steps.
    """
    context, found = engine.context, engine.context.found
    if not found.is_awaited(context):
        return None
    calls = found.calls
    if calls.begun >= patience:
        why: str | None = f"in {patience} training steps no optimizer's step was counted"
    elif not calls.is_over(step):
        calls.begin(step)
        return None
    elif any(context.control.gather(engine.deferred.owed)):  # gradients that wait cannot move
        return None
    else:
        why = _find(engine, tuple(calls.graphs)) if calls.graphs else "no call of a module was captured"
    calls.forget()
    found.is_open = False
    engine.place_anew()
    if why is not None:
        return told_of_shards(context, "for a training that runs no whole step", why)
    found.remember(engine.module)
    return None


def _find(engine: StepEngine, calls: Sequence[CapturedGraph]) -> str | None:
    """Find the plan; or why there is none, on all ranks."""
    context, found = engine.context, engine.context.found
    error: Exception | None = None
    try:
        names = names_by_id(engine.module)
        moving = followers(engine.module, engine.optimizers())
        state = optimizer_state(engine.optimizers(), {**names, **engine.stand_ins()})
        # A step may have given a parameter another name, under which calls read it since.
        layouts = {names[id(engine.module.get_parameter(name))]: layout for name, layout in engine.layouts.items()}
        joined = join_calls("training_step", calls)
    except Exception as caught:  # raised again below, once every rank knows
        error = caught
    try:
        context.control.raise_together(error)
        read = {item.name for item in joined.inputs if item.kind == "parameter"}
        unread = {name: layout for name, layout in layouts.items() if name not in read}
        rules = [rule for name, layout in unread.items() for rule in left_where_it_is(name, layout, context)]
        with context.progress.stage(f"find a plan for {joined.name}"):
            find_plan_of(joined, context, moving, layouts, state, _bytes_of(engine, unread, state[0]))
        assert found.answer is not None
        spec = found.answer.spec
        found.answer = replace(found.answer, spec=replace(spec, rules=(*spec.rules, *rules)))
    except AutoParallelError as refusal:  # the training goes on as it began
        return str(refusal)
    except Exception as failure:  # of ours, which all ranks have been told of: no reason to end a training that runs
        return f"{type(failure).__name__}: {failure}"
    finally:
        found.missing_bytes = 0.0
    return None


def _bytes_of(engine: StepEngine, unread: Mapping[str, ParameterLayout], state: OptimizerState) -> float:
    """What parameters that no joined call reads take of a rank: shards, what is kept of them, and one that is whole."""
    parameters = {name: engine.module.get_parameter(name) for name in unread}
    whole = [fxn.size_bytes(parameter) for parameter in parameters.values()]
    kept = 0.0
    for name, parameter in parameters.items():
        own = fxn.size_bytes(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        kept += own * (2 + state.of(name) if parameter.requires_grad else 1)
    return kept + max(whole, default=0)


def context_of(context: StageContext, call: StepCall) -> StageContext:
    """Where a call is made into a step: what is let go of after the first step, for the plan, is not compiled."""
    if not (call.local and call.trains and context.found.is_awaited(context)):
        return context
    return replace(context, config=replace(context.config, compile=False))
