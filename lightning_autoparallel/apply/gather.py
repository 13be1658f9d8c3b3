"""Shards back into plain tensors, as a module of one device has them, and its optimizers' state with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim import Optimizer

from lightning_autoparallel.apply.params import Replacements, attached_kept, from_first_rank
from lightning_autoparallel.torch_compat.tree import tree_map

_STEP = "step"  # optimizers count in a plain tensor, whatever the parameter is


def gather_module(module: nn.Module, replacements: Replacements) -> None:
    """Replace every shard by the whole parameter, without its gradient, on the host, where buffers go too; every rank
    calls it.
    """
    gathered: dict[int, nn.Parameter] = {}
    with attached_kept(module):
        for _, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                whole = whole_on_host(parameter.detach())
                gathered[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for submodule in module.modules():
            for name, present in list(submodule._parameters.items()):
                if present is not None and id(present) in gathered:
                    replacements.note(present, gathered[id(present)])
                    submodule._parameters[name] = gathered[id(present)]
    replacements.settle()
    module.cpu()


def whole_on_host(value: Any) -> Any:
    """A tensor as one device has it, on the host; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def rebind(optimizer: Optimizer, replacements: Replacements, convert: Callable[[Tensor, str, Any], Any]) -> None:
    """Make an optimizer train what is in the module now; ``convert(parameter, key, value)`` makes what it keeps."""
    before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replacements.rebind(optimizer.param_groups)
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for old, new in zip(before, after, strict=True):
        if old is not new and old in optimizer.state:
            kept = optimizer.state.pop(old)
            optimizer.state[new] = {key: convert(new, key, value) for key, value in kept.items()}


def whole_state(parameter: Tensor, key: str, value: Any) -> Any:
    """For ``rebind``: state of one device."""
    return tree_map(whole_on_host, value)


def shared_state(parameter: Tensor, key: str, value: Any) -> Any:
    """For ``rebind``: rank 0's state in shards, as its parameters are."""
    if isinstance(value, Tensor):
        from_first_rank(value)
    return sharded_state(parameter, key, value)


def sharded_state(parameter: Tensor | None, key: str, value: Any) -> Any:
    """For ``rebind``: a whole value as its parameter lies; every rank has all of it, so that nothing is sent."""
    if key == _STEP or not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape == parameter.shape or value.dim() == 0:
        return shard_like(parameter, value)
    # Statistics of rows or columns, say: whole on every rank, which computes the same as any part of it.
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, everywhere, src_data_rank=None)


def shard_like(present: Any, value: Any) -> Any:
    """This rank's part of ``value`` where ``present`` is a DTensor of its shape."""
    if not isinstance(present, DTensor) or not isinstance(value, Tensor) or value.shape != present.shape:
        return value
    return distribute_tensor(value.to(present.device), present.device_mesh, present.placements, src_data_rank=None)
