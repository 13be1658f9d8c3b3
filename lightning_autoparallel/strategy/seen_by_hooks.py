"""Whether code of the user runs between steps, where it may join over ranks what steps keep and return."""

from __future__ import annotations

from typing import Any

from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer

_NO_USERS = ("lightning", "pytorch_lightning", "lightning_autoparallel", "torchmetrics")  # whose callbacks are known
_BETWEEN = ("_start", "_end")


def has_hooks(module: LightningModule, trainer: Trainer) -> bool:
    """Whether the module, or a callback of the user's, has a hook for a start or an end."""
    every: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [each for each in every if type(each).__module__.split(".")[0] not in _NO_USERS]
    return _overrides(module, LightningModule) or any(_overrides(each, Callback) for each in callbacks)


def _overrides(given: Any, base: type) -> bool:
    names = [name for name in dir(base) if name.startswith("on_") and name.endswith(_BETWEEN)]
    return any(getattr(type(given), name) is not getattr(base, name) or name in vars(given) for name in names)
