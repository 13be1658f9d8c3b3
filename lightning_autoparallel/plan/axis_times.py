"""What the alternatives of a call, and moves of values, take on one axis: by the cost model that predictions are of."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.cost import GroupShape, HardwareSpec
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.cost.compute import share_time_us
from lightning_autoparallel.cost.fusion import CallKind, call_kind, graph_traffic, is_looked_up
from lightning_autoparallel.cost.placement import redistribution_kind
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import dim_of, is_shard
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.vocabulary_rules import reduced_inside

aten = torch.ops.aten
_PRODUCTS = {aten.einsum.default, aten.mm.default, aten.addmm.default, aten.bmm.default}
Cuts = Callable[[fx.Node], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Microseconds of the products that make a value, and by dim of it of those that read it and keep that dim."""

    making_us: float = 0.0
    reading_us: Mapping[int, float] = field(default_factory=dict)


NOTHING = Beside()


class AxisTimes:
    """Times on an axis of ``size`` ranks, where other axes have cut each output and argument into ``cuts`` parts."""

    def __init__(self, graph: fx.Graph, size: int, cuts: Cuts, group: GroupShape, hardware: HardwareSpec) -> None:
        self.size = size
        self._cuts, self._group, self._hardware = cuts, group, hardware
        self._kinds = {node: _kind(node) for node in graph.nodes}
        self._traffic = graph_traffic(graph, self._kinds)
        self._known: dict[Hashable, tuple[Candidate, float]] = {}  # with what an id in the key is of

    def of(self, node: fx.Node, candidate: Candidate) -> float:
        """Microseconds of a rank's part of a call.

        It does the share of the FLOPs that its most finely cut tensor is of the whole, and moves as much less as its
        tensors are smaller. What is reduced inside of it is launched beside that.
        """
        if node.op == "placeholder":
            return candidate.time_us
        before = self._cuts(node)
        key = id(candidate), before, self._traffic[node], self._kinds[node]  # equal calls have the same candidates
        if key not in self._known:
            self._known[key] = candidate, self._time_us(node, candidate, before)
        return self._known[key][1]

    def _time_us(self, node: fx.Node, candidate: Candidate, before: tuple[int, ...]) -> float:
        placements = (*candidate.outputs, *candidate.inputs)
        before = before or (1,) * len(placements)
        own = [self.size if is_shard(placement) else 1 for placement in placements]
        parts = [mine * other for mine, other in zip(own, before, strict=True)]
        share = 1 / (max(own, default=1) * max(before, default=1))
        moved = self._traffic[node] * _remaining(node, parts)
        computing_us = share_time_us(node, self._kinds[node], moved, share, self._hardware)
        return computing_us + self._inside_us(node, candidate, before)

    def _inside_us(self, node: fx.Node, candidate: Candidate, before: tuple[int, ...]) -> float:
        """Of all-reduces that the call is written out with, for which its own kernels wait."""
        arguments = fxn.tensor_arguments(node)
        if not arguments:
            return 0.0
        first = arguments[0].meta["val"]
        launches, size_bytes = reduced_inside(node.target, node.args, first, candidate.inputs[0])
        sent = size_bytes // before[len(candidate.outputs)]
        return launches * collective_time_us("all_reduce", sent, self._group, self._hardware) if launches else 0.0

    def move(self, source: Placement, target: Placement, size_bytes: int, beside: Beside = NOTHING) -> float:
        """Microseconds of redistributing a value that has ``size_bytes`` over all ranks of the axis.

        A gather before products, or a scatter after one, may be sent in parts ``beside`` them: of a dim that they do
        not add up over.
        """
        kind = redistribution_kind(source, target)
        if kind is None:
            return 0.0
        if kind == "impossible":
            return math.inf
        if kind == "slice":
            return self._hardware.copy_time_us(size_bytes / self.size)
        sent = size_bytes // self.size if kind == "all_to_all" else size_bytes
        time_us = collective_time_us(kind, sent, self._group, self._hardware)
        products_us = 0.0
        if kind == "all_gather" and is_shard(target):  # of what is gathered each rank takes a part: nothing reads it
            time_us += self._hardware.copy_time_us(size_bytes / self.size)
        elif kind == "all_gather":
            products_us = beside.reading_us.get(dim_of(source), 0.0)
        elif kind == "reduce_scatter":
            products_us = beside.making_us
        return min(time_us, self._in_parts_us(sent, products_us)) if products_us else time_us

    def _in_parts_us(self, size_bytes: int, products_us: float) -> float:
        """What sending part after part adds to products beside it: those that they do not hide, the first and the last.

        Infinite over gloo, where it is not done.
        """
        if self._hardware.backend != "nccl":
            return math.inf
        part_us = collective_time_us("permute", size_bytes // self.size, self._group, self._hardware)
        return max(0.0, (self.size - 1) * part_us - products_us) + 2 * part_us

    def beside(self, node: fx.Node, index: int) -> Beside:
        """The products that make and that read an output of ``node``."""
        value = fxn.values(node)[index]
        dims = range(0 if value is None else value.dim())
        reading = {dim: sum(map(self._least, _reading(node, dim))) for dim in dims}
        return Beside(making_us=self._least(node) if node.target in _PRODUCTS else 0.0, reading_us=reading)

    def _least(self, product: fx.Node) -> float:
        """Of a product that every rank does its part of."""
        parts = self.size * max(self._cuts(product), default=1)
        return share_time_us(product, self._kinds[product], self._traffic[product] / parts, 1 / parts, self._hardware)


def _reading(node: fx.Node, dim: int) -> list[fx.Node]:
    """The products with ``node`` whose results have its ``dim``."""
    return [user for user in node.users if user.target in _PRODUCTS and _keeps(user, node, dim)]


def _keeps(product: fx.Node, operand: fx.Node, dim: int) -> bool:
    if product.target is aten.einsum.default:
        terms, _, result = str(product.args[0]).replace(" ", "").partition("->")
        letters = terms.split(",")[list(product.args[1]).index(operand)]  # type: ignore[arg-type]
        return letters[dim] in result
    first, second = [argument for argument in product.args if isinstance(argument, fx.Node)][-2:]
    rank = len(second.meta["val"].shape)
    return (operand is first and dim != rank - 1) or (operand is second and dim != rank - 2)


def _kind(node: fx.Node) -> CallKind:
    """An operator that nothing is known of is taken to read what it is given and to write what it returns."""
    try:
        return call_kind(node)
    except UnsupportedOpError:
        return "kernel"


def _remaining(node: fx.Node, parts: list[int]) -> float:
    """What part of a call's bytes a rank touches, whose tensors are cut into so many parts."""
    arguments = fxn.tensor_arguments(node)
    tensors = [*fxn.values(node), *(argument.meta["val"] for argument in arguments)]
    sizes = [0 if tensor is None else fxn.size_bytes(tensor) for tensor in tensors]
    local = [size / part for size, part in zip(sizes, parts, strict=True)]
    for place, argument in enumerate(arguments, start=len(tensors) - len(arguments)):
        if is_looked_up(argument, node):
            sizes[place], local[place] = min(sizes[place], sizes[0]), min(local[place], local[0])
    touched = sum(sizes)
    return sum(local) / touched if touched else 0.0
