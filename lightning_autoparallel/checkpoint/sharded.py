"""Sharded checkpoints: a folder with every rank's shards of model and optimizers, the Trainer's state beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import LightningOptimizer

_TRAINER_STATE = "meta.pt"
RANDOM_STATE = "autoparallel_random_state"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder that ``save_sharded_checkpoint`` has written."""
    return (path / _TRAINER_STATE).is_file()


def model_state(module: nn.Module) -> dict[str, Any]:
    """Parameters (this rank's shards, as DTensors) and persistent buffers, on the CPU."""
    return get_model_state_dict(module, options=StateDictOptions(cpu_offload=True))


def optimizer_state(module: nn.Module, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
    """This rank's shards of an optimizer's state, keyed by parameter names."""
    plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return get_optimizer_state_dict(module, plain, options=StateDictOptions(cpu_offload=True))


def save_sharded_checkpoint(
    checkpoint: dict[str, Any], path: Path, random_state: Mapping[str, int], is_first: bool
) -> None:
    """Write Lightning's ``checkpoint`` as a folder at ``path``; every rank calls it, ``is_first`` on rank 0.

    ``random_state`` is the engine's seed and count of steps that drew: a resumed run goes on with new draws.
    """
    if path.is_file():
        raise CheckpointError(f"{path} is a file: a sharded checkpoint is a folder; remove it or choose another name")
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = state
    dcp.save(tensors, checkpoint_id=path)
    if is_first:
        torch.save({**checkpoint, RANDOM_STATE: dict(random_state)}, path / _TRAINER_STATE)


def load_sharded_checkpoint(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Load a folder written by ``save_sharded_checkpoint``; the Trainer's state and the random state.

    Raises:
        CheckpointError: ``path`` is no sharded checkpoint.
    """
    if not is_sharded_checkpoint(path):
        raise CheckpointError(
            f"{path} is no checkpoint: expected a file, or a folder with {_TRAINER_STATE}, as this strategy saves them"
        )
    trainer_state = torch.load(path / _TRAINER_STATE, map_location="cpu", weights_only=bool(weights_only))
    states = {"state_dict": model_state(module)}
    states.update({f"optimizer_{i}": optimizer_state(module, optimizer) for i, optimizer in enumerate(optimizers)})
    try:
        dcp.load(states, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path} does not fit the model: {error}") from error
    set_model_state_dict(module, states["state_dict"], options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(module, optimizer, states[f"optimizer_{index}"])
    return trainer_state, trainer_state.pop(RANDOM_STATE, {})
