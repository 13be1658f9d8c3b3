"""Copies of the module that others keep, averages of its weights for one: they lie in shards as it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_autoparallel.apply.gather import shard_like
from lightning_autoparallel.apply.params import ParameterLayout, attached_kept, shard_module, share_buffers


def copies_of(module: nn.Module, holders: Iterable[Any]) -> list[nn.Module]:
    """Modules of the same class with parameters of the same names and shapes in the attributes of ``holders``."""
    own, shapes = set(module.modules()), _shapes(module)
    values = [value for holder in holders for value in vars(holder).values() if isinstance(value, nn.Module)]
    parts = dict.fromkeys(part for value in values for part in value.modules())
    return [part for part in parts if type(part) is type(module) and part not in own and _shapes(part) == shapes]


def shard_copy(copy: nn.Module, layouts: Mapping[str, ParameterLayout], device: torch.device) -> None:
    """Shard a copy by the layouts of the module, so that the two can be computed with, and loaded, as one device's."""
    with attached_kept(copy):
        shard_module(copy, layouts, device)
        copy.to(device)
    share_buffers(copy)


def take_whole_tensors(module: nn.Module) -> list[RemovableHandle]:
    """Let ``load_state_dict`` of the module and its parts take whole tensors, too, until the handles are removed."""
    return [part.register_load_state_dict_pre_hook(_cut) for part in module.modules() if part._parameters]


def take_as_they_come(copy: nn.Module) -> None:
    """Undo ``take_whole_tensors`` in a copy of a module."""
    for part in copy.modules():
        hooks = part._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is _cut]:
            del hooks[key]


def _cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        key = f"{prefix}{name}"
        if isinstance(parameter, DTensor) and key in state and not isinstance(state[key], DTensor):
            state[key] = shard_like(parameter, state[key])


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
