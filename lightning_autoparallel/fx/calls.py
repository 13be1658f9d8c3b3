"""Calls added to a graph that there is already, their fake results computed on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.torch_compat.tracing import fake_evaluated

aten = torch.ops.aten

# What is said of one call alone: another one in its place is not that.
_OWN = {"val", "tensor_meta", "original_aten", "collective_role"}


class Calls:
    """Adds calls right before ``anchor``, of the same place in the user's code as ``meta``."""

    def __init__(self, anchor: fx.Node, meta: Mapping[str, Any] | None = None) -> None:
        self.anchor = anchor
        self._kept = {key: value for key, value in (anchor.meta if meta is None else meta).items() if key not in _OWN}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One call, evaluated on the fake values of its arguments."""
        value = fake_evaluated(target, args, kwargs)
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta = {**self._kept, "val": value}
        return node

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """The value in another shape, of a row-major copy where its layout does not allow a view."""
        value: Tensor = node.meta["val"]
        if list(value.shape) == shape:
            return node
        try:
            return self(aten.view.default, node, shape)
        except (RuntimeError, ValueError):
            return self(aten.view.default, self.contiguous(node), shape)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The value row by row: what collectives want."""
        if node.meta["val"].is_contiguous():
            return node
        return self(aten.clone.default, node, memory_format=torch.contiguous_format)
