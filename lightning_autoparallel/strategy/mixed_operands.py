"""Hooks compute with parameters, which lie in shards, as if these were whole.

Torch mixes no shards with whole tensors of a hook's own, and knows no shards for some functions (``flatten`` of rows
that ranks cannot share evenly).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_autoparallel.torch_compat.tree import tree_flatten

Call = Callable[..., Any]
_FOR_NO_SHARDS = ("Sharding propagation failed", "does not have a sharding strategy")  # as torch says it


class MixedOperands(TorchFunctionMode):
    """While it is open, a torch call that shards cannot be given is left to ``compute(function, args, kwargs)``."""

    def __init__(self, compute: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _are_mixed(args, kwargs):
            return self._compute(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _FOR_NO_SHARDS):
                raise
        return self._compute(func, args, kwargs)


def _are_mixed(*values: Any) -> bool:
    """Whether shards of one tensor meet all of another; single numbers, of shape (1,) too, may meet anything."""
    tensors = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
    in_shards = [isinstance(tensor, DTensor) for tensor in tensors]
    if not any(in_shards):
        return False
    others = [tensor for tensor, is_shard in zip(tensors, in_shards, strict=True) if not is_shard]
    return any(tensor.dim() > 1 or tensor.numel() != 1 for tensor in others)
