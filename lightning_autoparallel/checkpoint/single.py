"""Whole tensors: the state that one file of one device holds, gathered from shards and cut into shards again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_autoparallel.apply import sharded_state
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import LightningOptimizer
from lightning_autoparallel.torch_compat.tree import tree_map


def full_model_state(module: nn.Module, made: list[Tensor] | None = None) -> dict[str, Any]:
    """``module.state_dict()`` with whole tensors on the CPU, on every rank; every rank calls it.

    Those that share nothing with the module are added to ``made``.
    """
    state = module.state_dict()
    return _with_versions(_gathered(state, made), state)


def full_optimizer_state(optimizer: Optimizer | LightningOptimizer, made: list[Tensor] | None = None) -> dict[str, Any]:
    """``optimizer.state_dict()``, which numbers parameters, with whole tensors on the CPU; as ``full_model_state``."""
    return _gathered(optimizer.state_dict(), made)


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with its plain tensors on the CPU; shards stay where they are."""
    found: dict[str, Any] = tree_map(lambda leaf: leaf.detach().cpu() if _is_elsewhere(leaf) else leaf, dict(state))
    return _with_versions(found, state)


def _with_versions(found: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """With the modules' versions, which say how old files are read; a ``state_dict`` of one's own may have none."""
    if not hasattr(state, "_metadata"):
        return found
    ordered = OrderedDict(found)
    ordered._metadata = state._metadata  # type: ignore[attr-defined]
    return ordered


def _is_elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "cpu"


def _gathered(state: Mapping[str, Any], made: list[Tensor] | None) -> dict[str, Any]:
    def gather(leaf: Any) -> Any:
        whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        if not isinstance(whole, Tensor):
            return whole
        on_host = whole.detach().cpu()
        if made is not None and _storage(on_host) != _storage(leaf):
            made.append(on_host)
        return on_host

    whole: dict[str, Any] = tree_map(gather, dict(state))
    return whole


def load_full_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool, on_disk: bool = False) -> None:
    """Load whole tensors into a module that takes them (``take_whole_tensors``) where it has shards.

    Args:
        on_disk: they lie in a file (``read_file``): none of them is kept.

    Raises:
        CheckpointError: keys are missing or unexpected (if ``strict``), or a shape differs.
    """
    try:
        module.load_state_dict(_in_memory(module, state) if on_disk else state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
    if on_disk:
        _take_into_memory(module, state)


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], on_disk: bool = False) -> None:
    """Load what ``optimizer.state_dict()`` gave on one device into an optimizer over DTensors.

    Where ``configure_optimizers`` gives none, Lightning has one that keeps nothing.

    Args:
        on_disk: as for ``load_full_model_state``.

    Raises:
        CheckpointError: the optimizer has other groups of parameters.
    """
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    cut = {
        number: {key: _cut(by_number.get(number), key, value, on_disk) for key, value in values.items()}
        for number, values in state.get("state", {}).items()
    }
    others = {key: value for key, value in state.items() if key != "state"}
    try:
        optimizer.load_state_dict({**(copy.deepcopy(others) if on_disk else others), "state": cut})
    except ValueError as error:
        raise CheckpointError(f"the checkpoint does not fit the optimizer: {error}") from error


def _in_memory(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` from a file: torch copies what is a parameter's; what else modules are given, they may keep."""
    own: dict[str, Any] = copy.copy(state) if isinstance(state, dict) else dict(state)  # with its versions
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own.update(copy.deepcopy({key: value for key, value in own.items() if key not in parameters}))
    return own


def _take_into_memory(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy what ``_load_from_state_dict`` of a part assigned instead of copying it."""
    on_disk = {_memory(value) for value in state.values() if isinstance(value, Tensor)} - {None}
    for parameter in module.parameters():
        if not is_lazy(parameter) and _memory(parameter) in on_disk:
            parameter.data = parameter.data.clone()


def _cut(parameter: Tensor | None, key: str, value: Any, on_disk: bool) -> Any:
    """This rank's part of a value of the state of ``parameter``, in memory."""
    part = sharded_state(parameter, key, value)
    if not on_disk:
        return part
    if not isinstance(part, Tensor):
        return copy.deepcopy(part)
    return part.clone() if _memory(part) in (None, _memory(value)) else part


def _memory(tensor: Tensor) -> int | None:
    """Where it lies; None for sparse tensors, say."""
    try:
        return _storage(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def _storage(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
