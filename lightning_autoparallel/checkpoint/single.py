"""Whole tensors: the state that one file of one device holds, gathered from shards and cut into shards again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim import Optimizer

from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import LightningOptimizer
from lightning_autoparallel.torch_compat.tree import tree_map

_STEP = "step"  # optimizers count in a plain tensor, whatever the parameter is


def full_model_state(module: nn.Module, keep: bool) -> dict[str, Any]:
    """``module.state_dict()`` with whole tensors on the CPU; every rank calls it, those without ``keep`` get {}."""
    return _gathered(module.state_dict(), keep)


def full_optimizer_state(optimizer: Optimizer | LightningOptimizer, keep: bool) -> dict[str, Any]:
    """``optimizer.state_dict()``, which numbers parameters, with whole tensors on the CPU; as ``full_model_state``."""
    return _gathered(optimizer.state_dict(), keep)


def _gathered(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    def gather(leaf: Any) -> Any:
        # Every rank takes part in every gather; only the one that writes keeps what it got.
        whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        return whole.detach().cpu() if keep and isinstance(whole, Tensor) else whole if keep else None

    whole = tree_map(gather, dict(state))
    return whole if keep else {}


def load_full_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into a module whose parameters are DTensors: each rank keeps its part.

    Raises:
        CheckpointError: keys are missing or unexpected (if ``strict``), or a shape differs.
    """
    present = module.state_dict()
    cut = {name: _like(present.get(name), value) for name, value in state.items()}
    try:
        module.load_state_dict(cut, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``optimizer.state_dict()`` gave on one device into an optimizer over DTensors.

    Raises:
        CheckpointError: the optimizer has other groups of parameters.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    cut = {
        number: {key: _state_like(by_number.get(number), key, value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    try:
        optimizer.load_state_dict({**state, "state": cut})
    except ValueError as error:
        raise CheckpointError(f"the checkpoint does not fit the optimizer: {error}") from error


def _state_like(parameter: Tensor | None, key: str, value: Any) -> Any:
    if key == _STEP or not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape == parameter.shape or value.dim() == 0:
        return _like(parameter, value)
    # Statistics of rows or columns, say: whole on every rank, which computes the same as any part of it.
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, everywhere, src_data_rank=None)


def _like(present: Any, value: Any) -> Any:
    """This rank's part of ``value`` where ``present`` is a DTensor of its shape."""
    if not isinstance(present, DTensor) or not isinstance(value, Tensor) or value.shape != present.shape:
        return value
    # Every rank has read the file: nothing is sent.
    return distribute_tensor(value.to(present.device), present.device_mesh, present.placements, src_data_rank=None)
