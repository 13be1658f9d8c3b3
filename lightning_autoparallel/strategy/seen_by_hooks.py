"""Whether code of the user runs between steps, where it may join over ranks what steps keep and return."""

from __future__ import annotations

from typing import Any

from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer, is_of_lightning
from lightning_autoparallel.torch_compat.autograd import is_stepped_by_torch

_OURS = "lightning_autoparallel."
_BETWEEN = (
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start"),
    *("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward", "backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
    "on_train_batch_end",
)


def has_hooks(module: LightningModule, trainer: Trainer) -> bool:
    """Whether the module, or a callback of the user's, has a hook for an end."""
    every: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [each for each in every if _is_users(type(each).__module__)]
    return _overrides(module, LightningModule) or any(_overrides(each, Callback) for each in callbacks)


def has_code_between_steps(trainer: Trainer) -> bool:
    """Whether code of the user, which may talk to other ranks, runs between a training step and the next one's."""
    data: Any = getattr(trainer, "datamodule", None)
    holders: list[Any] = [trainer.lightning_module, data, *trainer.callbacks]  # type: ignore[attr-defined]
    hooks = [hook for each in holders for name in _BETWEEN if (hook := getattr(each, name, None)) is not None]
    kinds = [type(optimizer) for optimizer in trainer.optimizers]
    steps = [getattr(kind, "step", kind) for kind in kinds]  # one that wraps another may have none
    return any(map(_is_users_code, [*hooks, *steps])) or not all(map(is_stepped_by_torch, trainer.optimizers))


def _is_users_code(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return _is_users(module) and not module.startswith("torch.")


def _is_users(module: str) -> bool:
    """Whether it is not known what callbacks of a Python module do."""
    return not is_of_lightning(module) and not module.startswith(_OURS)


def _overrides(given: Any, base: type) -> bool:
    names = [name for name in dir(base) if name.startswith("on_") and name.endswith("_end")]
    return any(getattr(type(given), name) is not getattr(base, name) or name in vars(given) for name in names)
