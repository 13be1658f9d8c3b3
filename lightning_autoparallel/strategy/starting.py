"""What a module starts from: its own initial values, or weights that ``load_weights`` was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_autoparallel.checkpoint import WeightsToCome
from lightning_autoparallel.errors import AutoParallelError, CheckpointError, ConfigError
from lightning_autoparallel.pipeline import ControlGroup, StepEngine
from lightning_autoparallel.pipeline.agreement import first_difference
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
    _check_same_module(engine.module, control)
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


def still_lies_in_shards(engine: StepEngine) -> bool:
    """Whether a module that was left in shards has them where the engine put them; every rank calls it.

    Where another strategy, or the user, has moved it since, it is made whole, to be sharded anew.
    """
    meshes, parameters = {id(layout.mesh) for layout in engine.layouts.values()}, list(engine.module.parameters())
    if not parameters or any(isinstance(own, DTensor) and id(own.device_mesh) in meshes for own in parameters):
        return True
    engine.gather_parameters()
    return False


def shard_what_hooks_made(engine: StepEngine, control: ControlGroup, convert: Callable[[nn.Module], nn.Module]) -> None:
    """Shard parameters that have come later, as ``on_load_checkpoint`` makes layers as large as the checkpoint's.

    Every rank calls it, before weights are loaded; ``convert`` gives parameters the dtype of the run.

    Raises:
        ConfigError: on all ranks, if they have made others.
    """
    named = engine.module.named_parameters() if engine.layouts else ()
    made = {name: tuple(parameter.shape) for name, parameter in named if not isinstance(parameter, DTensor)}
    if not control.agrees(repr(made)):
        raise ConfigError(
            f"on_load_checkpoint has made the parameters {list(made) or 'none'} on this rank, and others, or of other "
            "shapes, on another: make them alike on all ranks"
        )
    if made:
        convert(engine.module)
        engine.forget_captures()
        engine.shard_parameters()


def _check_same_module(module: nn.Module, control: ControlGroup) -> None:
    named = [(name, value) for name, value in module.named_parameters() if not is_lazy(value)]
    mine = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in named}
    if control.agrees(repr(mine)):
        return
    differs = first_difference(control.gather(mine)) or "parameters come in different orders"
    raise ConfigError(
        f"ranks have made different modules: {differs}; make the same on all, in __init__, setup and configure_model"
    )


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
