"""Operators as torch dispatches them: modes that see each one, and what its tags and schema say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autoparallel.torch_compat.tree import tree_leaves

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "is_random",
    "shows_argument",
    "takes_whole_for_replicas",
    "written",
]


def takes_whole_for_replicas() -> bool:
    """Whether DTensors meet whole tensors as if these were replicas: inside of torch's ``implicit_replication()``."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def is_random(op: Any) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def shows_argument(op: Any) -> bool:
    """Whether the operator's result is a view of an argument, which it does not change."""
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in op._schema.arguments
    )


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that the call changes, those of lists included."""
    found: list[Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
