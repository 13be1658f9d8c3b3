"""Optimizers' states by the names of parameters, as folders hold them.

``torch.distributed.checkpoint.state_dict`` does so too, but makes a state that is not there yet by a step, which
counts: an Adam that was saved before its first step would go on with another bias correction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from lightning_autoparallel.checkpoint.single import load_full_optimizer_state
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import LightningOptimizer
from lightning_autoparallel.torch_compat.dcp import put


def optimizer_state(module: nn.Module, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
    """An optimizer's state with this rank's shards, keyed by parameter names."""
    plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    state = {"state": {}, "param_groups": [], **plain.state_dict()}  # Lightning has an optimizer that keeps nothing
    names = [name for group in _names(module, plain) for name in group]
    return {
        "state": {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def _names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters; those that the module does not have are counted."""
    known = {parameter: name for name, parameter in module.named_parameters()}
    return [
        [known.get(parameter, f"group{g}.{i}") for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def empty_optimizer_state(module: nn.Module, optimizer: Optimizer, metadata: Metadata, key: str) -> dict[str, Any]:
    """Room for all that a checkpoint has under ``key``: shards where a value has its parameter's shape."""
    names = [name for group in _names(module, optimizer) for name in group]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = dict(zip(names, parameters, strict=True))
    found: dict[str, Any] = {key: {"state": {}, "param_groups": []}}
    for flat, path in (metadata.planner_data or {}).items():
        if path[0] == key:
            parameter = by_name.get(path[2]) if path[1] == "state" else None
            put(found, path, room_for(metadata.state_dict_metadata[flat], parameter))
    return dict(found[key])


def room_for(stored: TensorStorageMetadata | BytesStorageMetadata, parameter: Tensor | None = None) -> Tensor | None:
    """A tensor to load a stored one into: as ``parameter`` lies, if it has its shape; None for another value."""
    if isinstance(stored, BytesStorageMetadata):
        return None
    dtype = stored.properties.dtype
    if parameter is not None and stored.size == parameter.shape and parameter.dim():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``optimizer_state`` gave, on whatever mesh.

    Raises:
        CheckpointError: the optimizer has other groups of parameters.
    """
    groups, names = state["param_groups"], _names(module, optimizer)
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in names]:
        raise CheckpointError(
            f"the checkpoint does not fit the optimizer: {type(optimizer).__name__} has groups of "
            f"{[len(group) for group in names]} parameters, the checkpoint of {[len(g['params']) for g in groups]}, or "
            "they are others; give it the parameters that it had when it was saved"
        )
    load_full_optimizer_state(optimizer, numbered(state, names))


def numbered(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """``Optimizer.state_dict()`` of what ``optimizer_state`` gave; ``names`` are those of each group, in order."""
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = zip(state["param_groups"], names, strict=True)
    return {
        "state": {numbers.get(name, name): values for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in own]} for group, own in groups],
    }
