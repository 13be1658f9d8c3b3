"""Gradients that an optimizer has stepped by, freed before the next forward where nothing could tell.

Lightning clears them between a step's forward and its backward, where memory is fullest. A step that is captured whole
reads none, so that they can go before it; what Lightning calls there, it calls as ever.
"""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_autoparallel.lightning_compat import (
    GradientAccumulationScheduler,
    Trainer,
    clears_gradients,
    hears_of_cleared_gradients,
)

__all__ = ["free_gradients", "keeps_gradients"]


def free_gradients(trainer: Trainer) -> None:
    """Clear what Lightning would clear behind the forward that comes now, if nothing looks at it until then."""
    if clears_gradients(trainer) and not _is_seen(trainer):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


def keeps_gradients(trainer: Trainer, name: str) -> bool:
    """Whether gradients are alive through the forward of some training step that is captured whole as ``name``.

    Those of the micro-batch before are, where several add up.
    """
    several = trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    return name != "training_step" or several or _is_seen(trainer)


def _is_seen(trainer: Trainer) -> bool:
    """Whether somebody may look at gradients, or clear them in a way of its own, between forward and backward."""
    own_way = any(
        type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        for optimizer in trainer.optimizers
    )
    return own_way or not trainer.lightning_module.automatic_optimization or hears_of_cleared_gradients(trainer)
