"""Torch's pytrees: what a step returns, flattened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["registered_children", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


def registered_children(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What an object of a registered class is made of, and a function that makes it anew; None for other objects."""
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda items: node.unflatten_fn(items, context)
