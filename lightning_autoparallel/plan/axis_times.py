"""What the alternatives of a call, and moves of values, take on one axis: by the cost model that predictions are of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.cost import GroupShape, HardwareSpec
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.cost.compute import share_time_us
from lightning_autoparallel.cost.fusion import CallKind, call_kind, graph_traffic
from lightning_autoparallel.cost.placement import redistribution_kind
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard
from lightning_autoparallel.plan.candidates import Candidate

aten = torch.ops.aten
_PRODUCTS = {aten.einsum.default, aten.mm.default, aten.addmm.default, aten.bmm.default}
Cuts = Callable[[fx.Node], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Microseconds of the products that make a value, and of those that read it."""

    making_us: float = 0.0
    reading_us: float = 0.0


NOTHING = Beside()


class AxisTimes:
    """Times on an axis of ``size`` ranks, where other axes have cut each output and argument into ``cuts`` parts."""

    def __init__(self, graph: fx.Graph, size: int, cuts: Cuts, group: GroupShape, hardware: HardwareSpec) -> None:
        self._size, self._cuts, self._group, self._hardware = size, cuts, group, hardware
        self._kinds = {node: _kind(node) for node in graph.nodes}
        self._traffic = graph_traffic(graph, self._kinds)

    def of(self, node: fx.Node, candidate: Candidate) -> float:
        """Microseconds of a rank's part of a call.

        It does the share of the FLOPs that its most finely cut tensor is of the whole, and moves as much less as its
        tensors are smaller.
        """
        if node.op == "placeholder":
            return candidate.time_us
        placements = (*candidate.outputs, *candidate.inputs)
        before = self._cuts(node) or (1,) * len(placements)
        own = [self._size if is_shard(placement) else 1 for placement in placements]
        parts = [mine * other for mine, other in zip(own, before, strict=True)]
        share = 1 / (max(own, default=1) * max(before, default=1))
        moved = self._traffic[node] * _remaining(node, parts)
        return share_time_us(node, self._kinds[node], moved, share, self._hardware)

    def move(self, source: Placement, target: Placement, size_bytes: int, beside: Beside = NOTHING) -> float:
        """Microseconds of redistributing a value that has ``size_bytes`` over all ranks of the axis.

        A gather before products, or a scatter after one, may be sent in parts ``beside`` them.
        """
        kind = redistribution_kind(source, target)
        if kind is None:
            return 0.0
        if kind == "impossible":
            return math.inf
        if kind == "slice":
            moving_us = 2 * size_bytes / self._size / (self._hardware.achieved_gb_per_s * 1e3)
            return max(moving_us, self._hardware.kernel_latency_us)
        sent = size_bytes // self._size if kind == "all_to_all" else size_bytes
        time_us = collective_time_us(kind, sent, self._group, self._hardware)
        products_us = {"all_gather": beside.reading_us, "reduce_scatter": beside.making_us}.get(kind, 0.0)
        return min(time_us, self._in_parts_us(sent, products_us)) if products_us else time_us

    def _in_parts_us(self, size_bytes: int, products_us: float) -> float:
        """What sending part after part adds to products beside it: those that they do not hide, the first and the last.

        Infinite over gloo, where it is not done.
        """
        if self._hardware.backend != "nccl":
            return math.inf
        part_us = collective_time_us("permute", size_bytes // self._size, self._group, self._hardware)
        return max(0.0, (self._size - 1) * part_us - products_us) + 2 * part_us

    def beside(self, node: fx.Node, index: int) -> Beside:
        """The products that make and that read an output of ``node``, views between them apart."""
        return Beside(
            making_us=sum(map(self._least, _making(node))), reading_us=sum(map(self._least, _reading(node, index)))
        )

    def _least(self, product: fx.Node) -> float:
        """Of a product that every rank does its part of."""
        parts = self._size * max(self._cuts(product), default=1)
        return share_time_us(product, self._kinds[product], self._traffic[product] / parts, 1 / parts, self._hardware)


def _making(node: fx.Node) -> list[fx.Node]:
    while node.target in fxn.VIEWS:
        node = node.all_input_nodes[0]
    return [node] if node.target in _PRODUCTS else []


def _reading(node: fx.Node, index: int) -> list[fx.Node]:
    readers = [user for user in node.users if not fxn.is_getitem(user) or user.args[1] == index]
    found = []
    for reader in readers:
        if fxn.is_getitem(reader) or reader.target in fxn.VIEWS:
            found += _reading(reader, 0)
        elif reader.target in _PRODUCTS:
            found.append(reader)
    return found


def _kind(node: fx.Node) -> CallKind:
    """An operator that nothing is known of is taken to read what it is given and to write what it returns."""
    try:
        return call_kind(node)
    except UnsupportedOpError:
        return "kernel"


def _remaining(node: fx.Node, parts: list[int]) -> float:
    """What part of a call's bytes a rank touches, whose tensors are cut into so many parts."""
    tensors = [*fxn.values(node), *(argument.meta["val"] for argument in fxn.tensor_arguments(node))]
    sizes = [0 if tensor is None else fxn.size_bytes(tensor) for tensor in tensors]
    touched = sum(sizes)
    return sum(size / part for size, part in zip(sizes, parts, strict=True)) / touched if touched else 0.0
