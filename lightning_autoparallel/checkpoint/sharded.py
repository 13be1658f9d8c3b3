"""Sharded checkpoints: a folder with every rank's shards of model and optimizers, the Trainer's state beside them.

Keys are those of Lightning's own folders (``model``, ``optimizer_0``, ..., ``meta.pt``), so that its tools read ours.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.apply import gathered, shard_like
from lightning_autoparallel.checkpoint.location import TRAINER_STATE, Location
from lightning_autoparallel.checkpoint.optimizers import empty_optimizer_state, load_optimizer_state
from lightning_autoparallel.checkpoint.single import load_full_model_state
from lightning_autoparallel.checkpoint.together import first_rank_runs
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.torch_compat.dcp import LoadPlanner, reader_of, writer_to
from lightning_autoparallel.torch_compat.tree import tree_map

RANDOM_STATE = "autoparallel_random_state"
FOUND_PLAN = "autoparallel_found_plan"
MODEL, OPTIMIZER = "model", "optimizer_{}"


def model_state(module: nn.Module) -> dict[str, Any]:
    """Parameters (this rank's shards, as DTensors) and persistent buffers, by the names that the module gives them."""
    return module.state_dict() if _has_own_names(module) else get_model_state_dict(module)


def _has_own_names(module: nn.Module) -> bool:
    """Whether its ``state_dict`` has others than its parameters and buffers do, which torch would look up in it."""
    known = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *_buffers(module))}
    return any(isinstance(value, Tensor) and name not in known for name, value in module.state_dict().items())


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def folder_of(checkpoint: Mapping[str, Any], random_state: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lightning's ``checkpoint`` as what ranks write together, and what rank 0 writes beside it.

    ``random_state`` is the engine's seed and count of steps that drew: a resumed run goes on with new draws.
    """
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {MODEL: rest.pop("state_dict", {})}
    for index, state in enumerate(rest.pop("optimizer_states", [])):
        tensors[OPTIMIZER.format(index)] = state
    return tensors, {**gathered(rest), RANDOM_STATE: dict(random_state)}


def save_folder(
    tensors: dict[str, Any],
    beside: dict[str, Any],
    location: Location,
    group: Any = None,
    planner: SavePlanner | None = None,
) -> None:
    """Write a folder, which is there when it is whole; every rank of ``group`` calls it.

    Raises:
        CheckpointError: something else is at ``location``, or a rank could not write; what was there stays, where
            folders can be renamed.
    """
    first_rank_runs(location.prepare, group)
    staging = location.staging()
    path = staging.path if staging.is_local else staging.url
    writer = writer_to(path, location.options)
    try:
        dcp.save(
            tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=not dist.is_initialized()
        )
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{location} could not be written: {_reason(error)}") from error

    def finish() -> None:
        with staging.file_system.open(staging.child(TRAINER_STATE).path, "wb") as file:
            torch.save(beside, file)
        location.publish()

    first_rank_runs(finish, group)


def read_sharded_model(
    location: Location, module: nn.Module, strict: bool, weights_only: bool | None, apart: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a folder as a module lies, on whatever mesh; the Trainer's state and the random state.

    The Trainer's state says by an empty list that the folder has optimizers' states, too. Its ``state_dict`` is to be
    loaded (``load_sharded_model``).

    Args:
        weights_only: as for ``torch.load``, whose default is True: nothing is unpickled but tensors and plain values.
        apart: into memory of its own, as hooks may change what is loaded, or keep the module's values.

    Raises:
        CheckpointError: there is no complete sharded checkpoint, or it does not fit.
    """
    reader, metadata, trainer_state = opened(location, weights_only)
    _check_names(location, metadata, module, strict)
    model = model_state(module)
    if apart:
        model = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, dict(model))
    states = {MODEL: model}
    _fill(states, location, reader, weights_only)
    random_state = trainer_state.pop(RANDOM_STATE, {})
    # of what is saved beside optimizers; a module may have none
    optimizers: dict[str, Any] = {"optimizer_states": []} if "lr_schedulers" in trainer_state else {}
    return {**trainer_state, **optimizers, "state_dict": states[MODEL]}, random_state


def load_sharded_model(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a ``state_dict`` that was read of a folder, in which hooks may have put whole tensors.

    Raises:
        CheckpointError: keys are missing or unexpected (if ``strict``), or a shape differs.
    """
    try:
        if _has_own_names(module):
            return load_full_model_state(module, state, strict)
        present = model_state(module)
        given = {
            name: value if isinstance(value, DTensor) else shard_like(present.get(name), value)
            for name, value in state.items()
        }
        set_model_state_dict(module, given, options=StateDictOptions(strict=strict))
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error


def load_sharded_optimizers(
    location: Location, module: nn.Module, optimizers: Sequence[Optimizer], weights_only: bool | None
) -> None:
    """Load what a folder has of the states of a module's optimizers.

    Raises:
        CheckpointError: it does not fit them.
    """
    reader, metadata, _ = opened(location, weights_only)
    saved = [index for index in range(len(optimizers)) if _has(metadata, OPTIMIZER.format(index))]
    states = {
        (key := OPTIMIZER.format(index)): empty_optimizer_state(module, optimizers[index], metadata, key)
        for index in saved
    }
    if not states:
        return
    _fill(states, location, reader, weights_only)
    for index in saved:
        load_optimizer_state(module, optimizers[index], states[OPTIMIZER.format(index)])


def _fill(
    states: dict[str, dict[str, Any]], location: Location, reader: dcp.FileSystemReader, weights_only: bool | None
) -> None:
    try:
        dcp.load(
            states,
            storage_reader=reader,
            planner=LoadPlanner(weights_only),
            no_dist=not dist.is_initialized(),
        )
    except (dcp.api.CheckpointException, ValueError) as error:
        raise CheckpointError(f"{location} does not fit the model: {_reason(error)}") from error


def opened(location: Location, weights_only: bool | None) -> tuple[dcp.FileSystemReader, Metadata, dict[str, Any]]:
    """What reads the shards, what they are, and the Trainer's state.

    Raises:
        CheckpointError: there is no complete sharded checkpoint, or it is not to be trusted.
    """
    if not location.is_sharded():
        raise CheckpointError(
            f"{location} is no checkpoint: expected a file, or a folder with {TRAINER_STATE} and .metadata, as this "
            "strategy saves them"
        )
    reader = reader_of(location.path if location.is_local else location.url, location.options, weights_only)
    return reader, _read(location, reader.read_metadata), _read(location, lambda: _load(location, weights_only))


def _load(location: Location, weights_only: bool | None) -> dict[str, Any]:
    file = location.child(TRAINER_STATE)
    with file.file_system.open(file.path, "rb") as stream:
        state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=weights_only)
    return state


def _read(location: Location, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{location} holds objects of Python, which are not unpickled from a file that may be a stranger's; if you "
            f"trust it, give weights_only=False to the Trainer's method: {error}"
        ) from error


def _has(metadata: Metadata, key: str) -> bool:
    return any(path[0] == key for path in (metadata.planner_data or {}).values())


def _check_names(location: Location, metadata: Metadata, module: nn.Module, strict: bool) -> None:
    if not strict:
        return
    stored = {".".join(map(str, path[1:])) for path in (metadata.planner_data or {}).values() if path[0] == MODEL}
    present = set(model_state(module))
    if stored != present:
        raise CheckpointError(
            f"{location} does not fit the model: it has no {sorted(present - stored)[:8]}, and the model has no "
            f"{sorted(stored - present)[:8]} (strict_loading=False takes what both have)"
        )


def _reason(error: BaseException) -> str:
    """Each rank's own words, without the traces around them."""
    if not isinstance(error, dcp.api.CheckpointException):
        return str(error)
    failures = {str(failure[0]) for failure in error.failures.values()}
    return "; ".join(sorted(failures)) or str(error)
