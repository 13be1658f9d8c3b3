"""``fuse_chained_all_gathers``: a value that is gathered over one axis and then over another is gathered once.

A plan that computes with a weight sharded over one axis in the forward and whole in the backward gathers it there in
two steps. Both send the same bytes as one all-gather on the ranks of both axes, which is one launch and keeps no value
in between. The later gather is the outer one in what comes out: gathered over the inner mesh axis first, the
joint group is that of the flattened mesh; the other way round it is a group with its ranks in another order. Where a
rearrangement behind the chain undoes the order, the group without that rearrangement is taken.

This is a pass over the split graphs: in the joint graph the forward reads what lies between the two gathers, while the
backward has a copy of the first gather of its own. It must come before gathers are merged into buckets or moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import FakeResults
from lightning_autoparallel.fx.layouts import ElementOrder, is_copy
from lightning_autoparallel.passes.joint_groups import JoinGroups
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class _Link:
    """An all-gather of a chain, and behind it every node up to the next one with the order of its elements."""

    gather: fx.Node
    behind: tuple[tuple[fx.Node, ElementOrder], ...]


@dataclass(frozen=True, kw_only=True)
class _Fusion:
    """One gather on ``axis`` instead of several; its elements in ``order`` are the value of ``end``."""

    axis: PlanAxis
    end: fx.Node
    order: ElementOrder


def fuse_chained_all_gathers(graph: fx.Graph, *, join: JoinGroups | None = None) -> tuple[str, ...]:
    """Replace chains of all-gathers, with views between them that change nothing, by one gather on the joint group.

    A chain is left alone where a value inside it has another reader or dtype, where ``join`` knows no group in its
    order, or where one gather would have to be copied into order and the chain is not. ``join`` is None on a mesh of
    one axis, where no chain can be.
    """
    if join is None:
        return ("skipped: one axis",)
    chains, results = 0, FakeResults()
    gone: set[fx.Node] = set()
    for gather in [node for node in graph.nodes if fxn.collective_kind(node) == "all_gather"]:
        links = [] if gather in gone else _chain(gather)
        for length in range(len(links), 1, -1):
            fusion = _fusion(links[:length], join)
            if fusion is not None:
                _fuse(graph, links[:length], fusion, results)
                gone |= {link.gather for link in links[:length]}
                chains += 1
                break
    return (f"{chains} chains fused, {len(gone) - chains} gathers less",) if chains else ()


def _chain(gather: fx.Node) -> list[_Link]:
    """``gather`` and those that follow on it alone, each with what lies behind it."""
    links: list[_Link] = []
    order = ElementOrder.unchanged(gather.args[0].meta["val"].numel())  # type: ignore[union-attr]
    following: fx.Node | None = gather
    while following is not None:
        order = order.stacked(_size_of(following))
        behind = list(_behind(following, order))
        links.append(_Link(gather=following, behind=tuple(behind)))
        last, order = behind[-1] if behind else (following, order)
        following = _only_reader(last)
        if following is not None and not _continues(following, gather):
            following = None
    return links


def _behind(gather: fx.Node, order: ElementOrder) -> Iterator[tuple[fx.Node, ElementOrder]]:
    """The wait for ``gather``, then views and copies while each is the only reader of the one before."""
    node = _only_reader(gather)
    while node is not None and fxn.collective_kind(node) is None and len(node.all_input_nodes) == 1:
        found = order.through(node)
        if found is None:
            return
        yield node, (order := found)
        node = _only_reader(node)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _continues(node: fx.Node, first: fx.Node) -> bool:
    same_dtype = node.op == "call_function" and getattr(node.meta["val"], "dtype", None) == first.meta["val"].dtype
    return same_dtype and fxn.collective_kind(node) == "all_gather"


def _size_of(gather: fx.Node) -> int:
    size = gather.args[1]
    assert isinstance(size, int)
    return size


def _fusion(links: Sequence[_Link], join: JoinGroups) -> _Fusion | None:
    """The best way to gather once: without a copy, as far down the chain as can be; else with one copy for another."""
    outermost_first = [link.gather for link in reversed(links)]
    elements = links[0].gather.args[0].meta["val"].numel()  # type: ignore[union-attr]
    sizes = [*(_size_of(gather) for gather in outermost_first), elements]
    for end, order, ranks in _ways(links[-1], sizes):
        axis = join([fxn.group_of(outermost_first[place]) for place in ranks])
        if axis is not None:
            assert axis.size == math.prod(sizes[:-1]), f"{axis} joins {sizes[:-1]} ranks"
            return _Fusion(axis=axis, end=end, order=order)
    return None


def _ways(last: _Link, sizes: Sequence[int]) -> Iterator[tuple[fx.Node, ElementOrder, tuple[int, ...]]]:
    """(the node to replace, the order it then has, the order of ranks), the best first."""
    ends = [(node, order) for node, order in last.behind if node.meta["val"].is_contiguous()]
    elements = len(sizes) - 1
    permutations = list(itertools.permutations(range(elements)))
    for (node, order), ranks in itertools.product(reversed(ends), permutations):
        rearranged = order.rearranged(sizes, (*ranks, elements))
        if rearranged.is_identity:
            yield node, rearranged, ranks
    copies = [place for place, (node, _) in enumerate(last.behind) if is_copy(node)]
    if copies and last.behind[copies[0]] in ends:
        # The whole value is copied into order anyway; one copy can do that from any order of ranks, best in long runs.
        node, order = last.behind[copies[0]]
        ways = [(node, order.rearranged(sizes, (*ranks, elements)), ranks) for ranks in permutations]
        yield from sorted(ways, key=lambda way: len(way[1].as_permutation()[0]))


def _fuse(graph: fx.Graph, links: Sequence[_Link], fusion: _Fusion, results: FakeResults) -> None:
    first, last, end = links[0].gather, links[-1].gather, fusion.end

    def call(origin: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta = origin | {"val": results.of(target, args, kwargs)}
        return node

    with graph.inserting_before(last):
        # what other passes have noted of either gather holds for both
        axis, noted = fusion.axis, first.meta | last.meta
        gathered = call(noted, collectives.ALL_GATHER, first.args[0], axis.size, axis.group_name)
    with graph.inserting_before(end):
        value = call(end.meta, collectives.WAIT, gathered)
        if not fusion.order.is_identity:
            shape, dims = fusion.order.as_permutation()
            value = call(end.meta, aten.permute.default, call(end.meta, aten.view.default, value, shape), dims)
            value = call(end.meta, aten.clone.default, value, memory_format=torch.contiguous_format)
        if value.meta["val"].shape != end.meta["val"].shape:
            value = call(end.meta, aten.view.default, value, list(end.meta["val"].shape))
    end.replace_all_uses_with(value)
    _erase_back_to(graph, end, first)


def _erase_back_to(graph: fx.Graph, node: fx.Node, first: fx.Node) -> None:
    while True:
        (source,) = node.all_input_nodes
        graph.erase_node(node)
        if node is first:
            return
        node = source
