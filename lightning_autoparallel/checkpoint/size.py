"""How large a checkpoint gets."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.tree import tree_leaves

FILE_LIMIT_BYTES = 8 * 10**9


def state_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the whole model and of what optimizers keep by now, over all ranks."""
    states = [module.state_dict(), *(optimizer.state_dict().get("state", {}) for optimizer in optimizers)]
    leaves = [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
