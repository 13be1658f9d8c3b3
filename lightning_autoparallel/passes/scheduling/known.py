"""Orders that were found before: what a decomposition was tried with is often what is scheduled in the end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn

Structure = tuple[Hashable, ...]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Places of the calls in the order before, what is said of it, and the calls' times in that order."""

    places: tuple[int, ...]
    notes: tuple[str, ...]
    times_us: tuple[float, ...]


@dataclass
class KnownOrders:
    """Orders by the structure of graphs whose caller holds the same of them; ``last`` are the times of the last one."""

    _orders: dict[Structure, _Order] = field(default_factory=dict)
    _last: tuple[fx.Graph, Mapping[fx.Node, float]] | None = None

    def find(self, structure: Structure, graph: fx.Graph) -> tuple[list[fx.Node], tuple[str, ...]] | None:
        """The nodes of ``graph``, the output apart, in the order that is known for its structure, and what is said."""
        known = self._orders.get(structure)
        if known is None:
            return None
        nodes = list(graph.nodes)
        self._last = graph, dict(zip(nodes, known.times_us, strict=True))
        return [nodes[place] for place in known.places], known.notes

    def keep(
        self,
        structure: Structure,
        before: Sequence[fx.Node],
        graph: fx.Graph,
        times_us: Mapping[fx.Node, float],
        notes: tuple[str, ...],
    ) -> None:
        """Remember the present order of ``graph``, whose nodes came in the order ``before``."""
        place = {node: index for index, node in enumerate(before)}
        self._orders[structure] = _Order(
            places=tuple(place[node] for node in list(graph.nodes)[:-1]),
            notes=notes,
            times_us=tuple(times_us[node] for node in [*before, graph.output_node()]),
        )
        self._last = graph, times_us

    def times_us(self, graph: fx.Graph) -> Mapping[fx.Node, float] | None:
        """Times of the calls of the graph that was ordered last, if it is this one."""
        return self._last[1] if self._last is not None and self._last[0] is graph else None


def structure_of(graph: fx.Graph) -> Structure:
    """What is called, on what, in which order, names apart: graphs of one structure are scheduled alike."""
    number: dict[fx.Node, int] = {}
    found: list[Hashable] = []
    for node in graph.nodes:
        number[node] = len(number)
        value = node.meta.get("val")
        shape = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
        arguments = tuple([number[argument] for argument in node.all_input_nodes])
        found.append((node.op, _what(node), arguments, shape, fxn.collective_role(node)))
    return tuple(found)


def _what(node: fx.Node) -> Any:
    if node.op == "placeholder":
        return node.name
    return (node.target, fxn.group_of(node)) if fxn.collective_kind(node) else node.target
