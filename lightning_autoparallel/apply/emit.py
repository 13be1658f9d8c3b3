"""Append calls to a graph, their fake results computed on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx.added_calls import FakeResults
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from lightning_autoparallel.torch_compat.viewable import can_be_viewed

aten = torch.ops.aten


class GraphEmitter:
    """A graph under construction; every call gets its ``val`` and the place in the user's code it belongs to."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode
        self._origin: dict[str, Any] = {}
        self._results = FakeResults(fake_mode)

    def on_behalf_of(self, node: fx.Node) -> None:
        """Give the calls that follow the annotations of ``node``."""
        self._origin = {
            key: node.meta[key] for key in ("custom", "partitioner_tag", "seq_nr", "stack_trace") if key in node.meta
        }

    def placeholder(self, name: str, value: Tensor) -> fx.Node:
        """An input of the graph."""
        node = self.graph.placeholder(name)
        node.meta.update(self._origin, val=value)
        return node

    def call(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """One call, evaluated on the fake values of its arguments."""
        value = self._results.of(target, args, kwargs)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta.update(self._origin, val=value)
        return node

    def call_of_rank(self, axis: PlanAxis, target: Any, *args: Any) -> fx.Node:
        """One call in whose numbers this rank's place on ``axis`` is: on other ranks it may equal other calls."""
        node = self.call(target, *args)
        node.meta["rank_axis"] = axis.name
        return node

    def view(self, node: fx.Node, shape: list[int], name: str | None = None) -> fx.Node:
        """A view; local strides may differ from the global ones it was captured with, then of a contiguous copy."""
        value: Tensor = node.meta["val"]
        if list(value.shape) == shape and name is None:
            return node
        dense = node if can_be_viewed(value, shape) else self.contiguous(node)
        return self.call(aten.view.default, dense, shape, name=name)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A dense, row-major value: what collectives want."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
