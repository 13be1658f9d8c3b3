"""What checkpoints are made of, with something else in the place of shards."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply.copies import take_as_they_come
from lightning_autoparallel.apply.gather import whole_on_host
from lightning_autoparallel.torch_compat.tree import tree_map


def gathered(state: Any, keep: bool = True) -> Any:
    """``state`` with whole tensors on the host in the place of shards; every rank calls it with the same shards.

    One that does not ``keep`` them gets none.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        found = whole_on_host(leaf)
        if not keep:
            return None
        return nn.Parameter(found, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else found

    return mapped_state(whole, state)


def mapped_state(convert: Callable[[Any], Any], state: Any) -> Any:
    """``state`` with its leaves converted; state dicts keep the modules' versions, by which they are read.

    Modules that hold shards, as hyperparameters may, are copied, and the shards in them are leaves.
    """
    mapped = tree_map(lambda leaf: _converted(convert, leaf) if isinstance(leaf, nn.Module) else convert(leaf), state)
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            mapped[key]._metadata = value._metadata
    return mapped


def _converted(convert: Callable[[Any], Any], module: nn.Module) -> nn.Module:
    tensors = chain(module.parameters(), module.buffers())
    instead = {id(tensor): convert(tensor) for tensor in tensors if isinstance(tensor, DTensor)}
    if not instead:
        return module
    copied = copy.deepcopy(module, instead)
    take_as_they_come(copied)
    return copied
