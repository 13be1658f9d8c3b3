"""What a module starts from: its own initial values, or weights that ``load_weights`` was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_autoparallel.checkpoint import WeightsToCome
from lightning_autoparallel.errors import AutoParallelError, CheckpointError
from lightning_autoparallel.pipeline import ControlGroup, StepEngine
from lightning_autoparallel.pipeline.same_order import check_same_plan

T = TypeVar("T")


def shard_and_load(engine: StepEngine, weights: WeightsToCome, control: ControlGroup) -> None:
    """Shard the engine's module and read into its shards what is to come; every rank calls it.

    Raises:
        CheckpointError: on all ranks, if files cannot be read on one or do not fit, or ranks ask for others.
        ConfigError: the module cannot be sharded or initialised.
        PassError: ranks have different plans.
    """
    check_same_plan(engine.context.config.plan, control)
    if not control.agrees(repr(weights.targets)):
        raise CheckpointError(
            f"load_weights was called for {weights.targets or 'nothing'} on this rank, and for something else on "
            "others: call it alike on all"
        )
    if not weights.targets:
        engine.shard_parameters()
        return
    given = _together(lambda: weights.open(engine.module), control)
    engine.shard_parameters(given)
    _together(lambda: weights.load(engine.module), control)


def _together(action: Callable[[], T], control: ControlGroup) -> T:
    error: AutoParallelError | None = None
    try:
        result = action()
    except AutoParallelError as ours:
        error = ours
    except Exception as other:
        error = CheckpointError(f"weights could not be read: {type(other).__name__}: {other}")
        error.__cause__ = other
    control.raise_together(error)
    return result
