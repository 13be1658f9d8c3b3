"""What a step may not ask of Lightning while it is captured: the ranks, and values that only real steps have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.lightning_compat import LightningModule, Trainer

_RANKS = ("global_rank", "local_rank")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_TALKS = ("all_gather", "broadcast", "barrier", "reduce", "reduce_boolean_decision")


def rank_patches(watcher: Watcher, module: LightningModule) -> list[Any]:
    """Patches for the duration of a run of the step; what they stand for refuses the capture."""
    asked: list[tuple[type, str]] = [(LightningModule, name) for name in _RANKS]
    asked += [(Trainer, name) for name in (*_RANKS, "world_size", "num_devices", "node_rank", "is_global_zero")]
    patches = [
        _refused(watcher, owner, name, "asks for the ranks", "a captured step is one program for all")
        for owner, name in asked
    ]
    patches += [
        _refused(
            watcher, Trainer, name, "reads logged values", "they are known at real steps only, and change with each"
        )
        for name in _METRICS
    ]
    trainer = getattr(module, "_trainer", None)
    strategies = [] if trainer is None else type(trainer.strategy).__mro__
    for owner in (LightningModule, *strategies):
        patches += [mock.patch.object(owner, name, _talks(watcher, name)) for name in _TALKS if name in vars(owner)]
    return patches


def _refused(watcher: Watcher, owner: type, name: str, does: str, why: str) -> Any:
    def refuse(self: Any) -> Any:
        raise watcher.refuse(f"{user_line()} {does} ({name}): {why}")

    return mock.patch.object(owner, name, property(refuse))


def _talks(watcher: Watcher, name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise watcher.refuse(
            f"{user_line()} talks to other ranks ({name}): a captured step sees the global batch already"
        )

    return refuse
