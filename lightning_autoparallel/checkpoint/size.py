"""How large a checkpoint gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.tree import tree_leaves

FILE_LIMIT_BYTES = 8 * 10**9


def gathered_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Bytes of all parameters and buffers, in its ``state_dict`` or not, and of what optimizers keep by now."""
    states = [optimizer.state_dict().get("state", {}) for optimizer in optimizers]
    return _bytes([*module.parameters(), *module.buffers(), *states])


def state_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the whole model and of what optimizers keep by now, over all ranks."""
    states = [module.state_dict(), *(optimizer.state_dict().get("state", {}) for optimizer in optimizers)]
    return _bytes(states)


def _bytes(states: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
