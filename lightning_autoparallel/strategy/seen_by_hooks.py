"""Whether code of the user runs between steps, where it may join over ranks what steps keep and return."""

from __future__ import annotations

from typing import Any

from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer, is_of_lightning

_OURS = "lightning_autoparallel."


def has_hooks(module: LightningModule, trainer: Trainer) -> bool:
    """Whether the module, or a callback of the user's, has a hook for an end."""
    every: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [each for each in every if _is_users(type(each).__module__)]
    return _overrides(module, LightningModule) or any(_overrides(each, Callback) for each in callbacks)


def _is_users(module: str) -> bool:
    """Whether it is not known what callbacks of a Python module do."""
    return not is_of_lightning(module) and not module.startswith(_OURS)


def _overrides(given: Any, base: type) -> bool:
    names = [name for name in dir(base) if name.startswith("on_") and name.endswith("_end")]
    return any(getattr(type(given), name) is not getattr(base, name) or name in vars(given) for name in names)
