"""ModelPruning on a sharded model: what it changes is changed where parameters are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_autoparallel.apply import shard_like
from lightning_autoparallel.lightning_compat import ModelPruning, Trainer

WholeParameters = Callable[[], contextlib.AbstractContextManager[None]]
_CHANGES = ("apply_pruning", "apply_lottery_ticket_hypothesis", "make_pruning_permanent")


@contextlib.contextmanager
def pruned_whole(trainer: Trainer, whole_parameters: WholeParameters) -> Iterator[None]:
    """Inside, ModelPruning finds whole parameters where it chooses which to prune, and where it makes that permanent.

    Each time they are gathered, and steps are captured anew: modules compute with masks from then on, or do no more.
    """
    with contextlib.ExitStack() as patches:
        kinds = {type(found) for found in trainer.callbacks if isinstance(found, ModelPruning)}  # type: ignore[attr-defined]
        for kind in kinds:
            for name in _CHANGES:
                change = _inside(whole_parameters, getattr(kind, name))
                patches.enter_context(mock.patch.object(kind, name, change))
        if kinds:
            patches.enter_context(mock.patch.object(ModelPruning, "on_save_checkpoint", _save_pruned))
        yield


def _inside(whole_parameters: WholeParameters, change: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(change)
    def changed(*args: Any, **kwargs: Any) -> Any:
        with whole_parameters():
            return change(*args, **kwargs)

    return changed


def _save_pruned(callback: Any, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """As Lightning's: parameters with their masks applied under the names of one that was never pruned.

    It changes the state that is there, in shards, or whole on every rank.
    """
    if not callback._make_pruning_permanent:
        return
    state = checkpoint["state_dict"]
    masked = [key.removesuffix("_mask") for key in state if key.endswith("_mask")]
    for name in [name for name in masked if f"{name}_orig" in state]:
        orig: Tensor = state.pop(f"{name}_orig")
        mask = shard_like(orig, state.pop(f"{name}_mask").to(orig))
        state[name] = mask * orig
        for kept in checkpoint.get("optimizer_states", ()):
            _rename(kept, f"{name}_orig", name)


def _rename(kept: dict[str, Any], before: str, now: str) -> None:
    """In a folder, optimizers name their parameters; in a file, they number them."""
    if before in kept.get("state", {}):
        kept["state"][now] = kept["state"].pop(before)
    for group in kept.get("param_groups", ()):
        group["params"] = [now if name == before else name for name in group["params"]]
