"""Where, in a value, the parts of ranks lie, followed through calls that only move elements.

What is gathered holds the parts of all ranks one behind the other; what is to be scattered, those for all ranks. Views
and transposes make of that a dim in which ranks alternate: (batch, ranks x rows, width) viewed as (batch x ranks x
rows, width) has ranks between batch and rows. Where every call on the way keeps them in one dim, it can be made for one
rank's part alone, on a shape in which that dim is as many times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls

aten = torch.ops.aten

RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_SAME_SHAPE = {aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A dim of ``outer x ranks x inner`` elements, of which a part holds those of one rank."""

    dim: int
    outer: int
    inner: int

    def part_of(self, shape: Sequence[int]) -> list[int]:
        """The shape of one rank's part."""
        return [self.outer * self.inner if dim == self.dim else size for dim, size in enumerate(shape)]

    def spread(self, shape: Sequence[int], middle: int) -> list[int]:
        """The shape with the dim taken apart in ``outer`` and ``middle``."""
        return [*shape[: self.dim], self.outer, middle, *shape[self.dim + 1 :]]


def moves(node: fx.Node) -> bool:
    """Whether the call only moves the elements of its first argument, or casts them."""
    if node.op != "call_function":
        return False
    if node.target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"} and (
            node.meta["val"].device == node.all_input_nodes[0].meta["val"].device
        )
    return fxn.is_wait(node) or node.target in RESHAPES | _SAME_SHAPE or _order_of(node) is not None


def behind(node: fx.Node, cut: Cut, ranks: int) -> Cut | None:
    """The cut of what ``node``, which moves elements, makes of a value with this cut; None where no dim has it."""
    source = node.all_input_nodes[0].meta["val"].shape
    return _moved(node, cut, source, node.meta["val"].shape, ranks, ahead=False)


def ahead(node: fx.Node, cut: Cut, ranks: int) -> Cut | None:
    """The cut that the argument of ``node`` must have for its result to have this one; None where no dim has it."""
    source = node.all_input_nodes[0].meta["val"].shape
    return _moved(node, cut, node.meta["val"].shape, source, ranks, ahead=True)


def move_part(call: Calls, node: fx.Node, part: fx.Node, cut: Cut) -> fx.Node:
    """``node`` on one rank's part of its argument; ``cut`` is that of its result."""
    if node.target in RESHAPES:
        return call.view(part, cut.part_of(node.meta["val"].shape))
    if fxn.is_wait(node) or node.target in (aten.alias.default, aten.detach.default):
        return part
    if node.target is aten.clone.default and part.meta["val"].is_contiguous():
        return part  # what had to be copied into order is in order
    return call(node.target, part, *node.args[1:], **node.kwargs)


def _moved(
    node: fx.Node, cut: Cut, before: Sequence[int], after: Sequence[int], ranks: int, *, ahead: bool
) -> Cut | None:
    if node.target in RESHAPES:
        return _viewed(cut, before, after, ranks)
    order = _order_of(node)
    if order is None:
        return cut
    dim = order[cut.dim] if ahead else order.index(cut.dim)
    return Cut(dim=dim, outer=cut.outer, inner=cut.inner)


def _viewed(cut: Cut, before: Sequence[int], after: Sequence[int], ranks: int) -> Cut | None:
    """Elements of neighbouring ranks are as far apart in another shape: the dim that this is within."""
    stride, tail = cut.inner * math.prod(before[cut.dim + 1 :]), 1
    for dim in reversed(range(len(after))):
        size = after[dim]
        if tail <= stride < tail * size:
            fits = stride % tail == 0 and size % (stride // tail * ranks) == 0
            inner = stride // tail
            return Cut(dim=dim, outer=size // (inner * ranks), inner=inner) if fits else None
        tail *= size
    return None


def _order_of(node: fx.Node) -> list[int] | None:
    """For a call that brings dims into another order: the dim of its argument that each of its own is."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    dims = list(range(node.meta["val"].dim()))
    if node.target is aten.permute.default:
        return [dims[dim] for dim in node.args[1]]  # type: ignore[union-attr, index, misc]
    if len(dims) > 1:
        one, other = (0, 1) if node.target is aten.t.default else node.args[1:]
        dims[one], dims[other] = dims[other], dims[one]  # type: ignore[index]
    return dims
