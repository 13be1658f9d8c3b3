"""Which memory each value of a graph lies in.

Fake tensors cannot tell: equal calls of a lowered graph share one fake result. So aliases follow from the operators'
schemas, and sizes alone from the fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.in_place import adds_in_place
from lightning_autoparallel.torch_compat.schemas import Place, result_places, views_first_argument

aten = torch.ops.aten

# Operators that return their input's memory, though their schemas do not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}
# Operators that view their input where its layout allows it, and copy it elsewhere.
_VIEW_OR_COPY = {aten.reshape, aten.contiguous, aten.flatten, aten.to}

Held = int | None | tuple[int | None, ...]  # indices of storages: one, none, or one per result


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A piece of memory: the node that first holds it, which of its results that is, and its bytes."""

    node: fx.Node
    result: int | None  # None: the node has one result
    size_bytes: int

    @property
    def name(self) -> str:
        """``mm_3``, or ``split_1[2]`` for a node with several results."""
        return self.node.name if self.result is None else f"{self.node.name}[{self.result}]"


@dataclass(frozen=True, kw_only=True)
class GraphStorages:
    """The storages of a graph in the order of their creation, and for each node those that its value lies in."""

    storages: tuple[Storage, ...]
    held: Mapping[fx.Node, Held]

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """Indices of the storages that the node's value keeps alive, each once."""
        held = self.held.get(node)
        if isinstance(held, tuple):
            return tuple(dict.fromkeys(index for index in held if index is not None))
        return () if held is None else (held,)


def resolve_storages(graph: fx.Graph, same: Mapping[str, Storage] | None = None) -> GraphStorages:
    """Views, waits and in-place results are found in the storage of what they show; other values have one of their own.

    ``same`` maps placeholders to the storages of another graph that they were handed over from.

    Raises:
        UnsupportedOpError: a node has no recorded value, so that its size is unknown.
    """
    resolver = _Resolver(same or {})
    for node in graph.nodes:
        if node.op != "output":
            resolver.held[node] = resolver.resolve(node)
    return GraphStorages(storages=tuple(resolver.storages), held=resolver.held)


def storage_bytes(value: Tensor) -> int:
    """Bytes of the whole storage that a tensor lies in; of its shape where it has none of its own."""
    try:
        return int(value.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # wrapper subclasses and sparse layouts have no storage to ask
        return fxn.size_bytes(value)


def rounded(size_bytes: int, multiple: int) -> int:
    """Bytes that an allocator takes which hands out multiples of ``multiple``."""
    return -(-size_bytes // multiple) * multiple


@dataclass
class _Resolver:
    same: Mapping[str, Storage]
    storages: list[Storage] = field(default_factory=list)
    held: dict[fx.Node, Held] = field(default_factory=dict)
    _handed: dict[Storage, Held] = field(default_factory=dict)
    _places: dict[Any, tuple[Place | None, ...]] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> Held:
        source = self.same.get(node.name) if node.op == "placeholder" else None
        if source is not None:
            if source not in self._handed:
                self.storages.append(Storage(node=node, result=None, size_bytes=source.size_bytes))
                self._handed[source] = len(self.storages) - 1
            return self._handed[source]
        if fxn.is_getitem(node):
            return self._item(node)
        if adds_in_place(node):
            return self._shown(node, node.args[-1])
        if fxn.is_wait(node) or node.target in _UNDECLARED_VIEWS:
            return self._shown(node, node.args[0])
        return self._call(node)

    def _item(self, node: fx.Node) -> Held:
        source, index = node.args
        held = self.held[source]  # type: ignore[index]
        assert isinstance(held, tuple) and isinstance(index, int), node.format_node()
        return held[index]

    def _call(self, node: fx.Node) -> Held:
        places = self._places_of(node.target)
        if not any(places) or (getattr(node.target, "overloadpacket", None) in _VIEW_OR_COPY and not _views_here(node)):
            return self._new(node)
        if len(places) == 1:
            return self._shown(node, _argument(node, places[0]))
        fresh = self._new(node, [place is None for place in places])
        assert isinstance(fresh, tuple)
        shown = [self._first(_argument(node, place)) for place in places]
        return tuple(old if new is None else new for new, old in zip(fresh, shown, strict=True))

    def _places_of(self, target: Any) -> tuple[Place | None, ...]:
        if target not in self._places:
            self._places[target] = result_places(target)
        return self._places[target]

    def _first(self, argument: Any) -> int | None:
        held = self.held[argument] if isinstance(argument, fx.Node) else None
        return held if isinstance(held, int) else None

    def _shown(self, node: fx.Node, argument: Any) -> Held:
        """The storages of an argument, as a view of it holds them: a list of views of one tensor, or one each."""
        several = isinstance(_value(node), (list, tuple))
        if isinstance(argument, (list, tuple)):
            return tuple(self._first(item) for item in argument)
        held = self.held[argument]
        return tuple(held for _ in _value(node)) if several and isinstance(held, int) else held

    def _new(self, node: fx.Node, keep: list[bool] | None = None) -> Held:
        value = _value(node)
        if isinstance(value, (list, tuple)):
            wanted = keep or [True] * len(value)
            return tuple(
                self._add(node, v, i) if k else None for i, (v, k) in enumerate(zip(value, wanted, strict=True))
            )
        return self._add(node, value, None)

    def _add(self, node: fx.Node, value: Any, result: int | None) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.storages.append(Storage(node=node, result=result, size_bytes=storage_bytes(value)))
        return len(self.storages) - 1


def _argument(node: fx.Node, place: Place | None) -> Any:
    if place is None:
        return None
    position, name = place
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _views_here(node: fx.Node) -> bool:
    """Whether a call that may copy shows its input's memory, tried on tensors without data of equal geometry."""

    def geometry(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), geometry)
    return views_first_argument(node.target, args, kwargs)  # type: ignore[arg-type]


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise UnsupportedOpError(
            f"{fxn.describe(node)} ({node.target}) has no recorded value, so the memory it takes is unknown: a pass "
            "that adds a node must set its meta['val']"
        )
    return node.meta["val"]
