"""Gradients that an optimizer has stepped by, freed before the next forward where nothing could tell.

Lightning clears them between a step's forward and its backward, where memory is fullest. A step that is captured whole
reads none, so that they can go before it; what Lightning calls there, it calls as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_autoparallel.contracts import EarlierGradients
from lightning_autoparallel.lightning_compat import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    begins_to_accumulate,
    hears_of_cleared_gradients,
    skips_backward,
)

__all__ = ["earlier_gradients", "free_gradients", "micro_batches", "told_of_kept"]


def free_gradients(trainer: Trainer) -> bool:
    """Let go what Lightning would clear behind the forward that comes now, if nothing looks at it until then.

    Whether they stay through that forward, which a backward follows.
    """
    if skips_backward(trainer):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not begins_to_accumulate(trainer) or _is_seen(trainer.lightning_module, trainer.optimizers, callbacks):
        return True
    for parameter in _held(trainer.optimizers):
        parameter.grad = None
    return False


def earlier_gradients(
    module: LightningModule, optimizers: Sequence[Optimizer], name: str, callbacks: Sequence[Callback] | None = None
) -> EarlierGradients:
    """What becomes of the gradients that lie there as some training step begins that is captured as ``name``.

    Those of the micro-batch before are kept, where several add up. Where no optimizer clears those of some parameters,
    all are said to be cleared: beside the backward they are not counted. ``callbacks`` are the training's, if its
    Trainer has others.
    """
    callbacks = module.trainer.callbacks if callbacks is None else callbacks  # type: ignore[attr-defined]
    if module.trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, GradientAccumulationScheduler) for callback in callbacks
    ):
        return "kept"
    if name != "training_step" or _is_seen(module, optimizers, callbacks):
        return "cleared"
    trained = sum(parameter.requires_grad for parameter in module.parameters())
    held = {id(parameter) for parameter in _held(optimizers) if parameter.requires_grad}
    return "cleared" if len(held) < trained else "freed"


def micro_batches(module: LightningModule) -> int:
    """How many of a training step one step of its optimizers is for; 1 where its own Python decides."""
    return int(module.trainer.accumulate_grad_batches) if module.automatic_optimization else 1


def told_of_kept(module: LightningModule) -> str | None:
    """What is to be said where gradients stay through a forward whose prediction lacks them; None without any."""
    if all(parameter.grad is None for parameter in module.parameters()):
        return None
    return (
        "autoparallel: the gradients of the step before stay through the forward of training_step, which was captured "
        "when they were freed before it: a hook or an optimizer clears them now, or micro-batches add up. More memory "
        "is taken than was predicted, by one copy of the gradients"
    )


def _held(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _is_seen(module: LightningModule, optimizers: Sequence[Optimizer], callbacks: Sequence[Callback]) -> bool:
    """Whether somebody may look at gradients, or clear them in a way of its own, between forward and backward."""
    own_way = any(  # an optimizer for Lightning is whatever has a step and groups of parameters
        getattr(type(optimizer), "zero_grad", None) is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        for optimizer in optimizers
    )
    return own_way or not module.automatic_optimization or hears_of_cleared_gradients(module, callbacks)
