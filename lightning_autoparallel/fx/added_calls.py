"""Calls added to a graph, their fake results computed on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.torch_compat.tracing import FakeTensor, FakeTensorMode, fake_evaluated, fake_mode_of
from lightning_autoparallel.torch_compat.viewable import can_be_viewed

aten = torch.ops.aten

# What is said of one call alone: another one in its place is not that.
_OWN = {"val", "tensor_meta", "original_aten", "collective_role", "computed_early", "rank_axis"}


class FakeResults:
    """What calls result in, computed on the recorded values of their arguments.

    Equal calls on values of equal geometry share one fake result: the blocks of a model are evaluated once. ``mode`` is
    for calls without tensors, which tell no fake mode.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self._mode = mode
        self._known: dict[Any, Any] = {}

    def of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call, whose arguments may be nodes."""
        key = (target, _geometry(args), _geometry(kwargs))
        if key not in self._known:
            with self._mode or contextlib.nullcontext():
                self._known[key] = fake_evaluated(target, args, kwargs)
        return self._known[key]


def results_beside(node: fx.Node) -> FakeResults:
    """Results that are fake as that of ``node`` is, also those of calls without tensors."""
    value = node.meta["val"]
    return FakeResults(fake_mode_of(value) if isinstance(value, FakeTensor) else None)


def _geometry(argument: Any) -> Any:
    """All of an argument that the geometry of a result can depend on, as a key."""
    if isinstance(argument, fx.Node):
        return _geometry(argument.meta["val"])
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple(_geometry(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _geometry(item)) for name, item in argument.items())
    return type(argument), argument


class Calls:
    """Adds calls right before ``anchor``, of the same place in the user's code as ``meta``.

    Those that share ``results`` evaluate equal calls once.
    """

    def __init__(
        self, anchor: fx.Node, meta: Mapping[str, Any] | None = None, results: FakeResults | None = None
    ) -> None:
        self.anchor = anchor
        self.results = results or FakeResults()
        self._kept = {key: value for key, value in (anchor.meta if meta is None else meta).items() if key not in _OWN}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One call, evaluated on the fake values of its arguments."""
        value = self.results.of(target, args, kwargs)
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta = {**self._kept, "val": value}
        return node

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """The value in another shape, of a row-major copy where its layout does not allow a view."""
        value: Tensor = node.meta["val"]
        if list(value.shape) == shape:
            return node
        return self(aten.view.default, node if can_be_viewed(value, shape) else self.contiguous(node), shape)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The value row by row: what collectives want."""
        if node.meta["val"].is_contiguous():
            return node
        return self(aten.clone.default, node, memory_format=torch.contiguous_format)
