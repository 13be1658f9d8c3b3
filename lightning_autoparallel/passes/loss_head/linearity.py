"""What is a multiple of a loss's tangent: it can be computed for a tangent of 1, before there is one, and scaled later.

A gradient is its loss's tangent times something that does not depend on it, as long as no call on the way does more
than scale, add, move or multiply with what is known already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.passes.decompose.cuts import moves
from lightning_autoparallel.passes.loss_head.head_region import NotChunkable
from lightning_autoparallel.torch_compat.rank_operators import WIDE_PRODUCT

aten = torch.ops.aten


def late_calls(graph: fx.Graph, tangents: Collection[fx.Node]) -> set[fx.Node]:
    """Everything that depends on a tangent, tangents among it."""
    late = set(tangents)
    for node in graph.nodes:
        if node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def the_tangent(late: Collection[fx.Node]) -> fx.Node:
    """The one scalar tangent among these.

    Raises:
        NotChunkable: there are several, or it is no scalar.
    """
    found = [node for node in late if node.op == "placeholder"]
    if len(found) != 1 or found[0].meta["val"].numel() != 1:
        raise NotChunkable("its gradient does not come from one loss")
    return found[0]


def check_linear(calls: Iterable[fx.Node], late: Collection[fx.Node]) -> None:
    """Whether all of these are multiples of the tangent.

    Raises:
        NotChunkable: one is not, as far as is known of its operator.
    """
    for node in calls:
        if node.op != "placeholder" and not _is_linear(node, late):
            raise NotChunkable(f"{node.target} ({fxn.describe(node)}) is no multiple of the loss's gradient")


def with_unit_tangent(
    entries: Iterable[fx.Node], late: Collection[fx.Node], tangent: fx.Node, call: Calls
) -> dict[fx.Node, fx.Node]:
    """Copies of ``entries``, and of what they are computed from, as they are where the tangent is 1."""
    copies: dict[fx.Node, fx.Node] = {}
    leading = fxn.with_ancestors(entries, among=lambda node: node in late)
    for node in tangent.graph.nodes:
        if node is tangent:
            value = node.meta["val"]
            copies[node] = call(aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device)
        elif node in leading:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: copies.get(argument, argument))
            copies[node] = call(node.target, *args, **kwargs)
    return copies


def _is_linear(node: fx.Node, late: Collection[fx.Node]) -> bool:
    given = fxn.tensor_arguments(node)
    where = [index for index, argument in enumerate(given) if argument in late]
    kind = fxn.collective_kind(node)
    if kind in ("all_reduce", "reduce_scatter"):
        return where == [0] and node.args[1] in ("sum", "avg")
    if moves(node) or node.target in _LINEAR or kind in ("all_gather", "all_to_all") or fxn.is_view_of_all(node):
        return where == [0]
    rule = _RULES.get(node.target)  # type: ignore[call-overload]
    return rule is not None and rule(node, where, [_is_zero(argument) for argument in given])


def _is_zero(node: fx.Node) -> bool:
    position = {aten.scalar_tensor.default: 0, aten.full.default: 1}.get(node.target)  # type: ignore[call-overload]
    value: Any = None if position is None else node.args[position]
    return isinstance(value, (int, float)) and value == 0


_Rule = Callable[[fx.Node, list[int], list[bool]], bool]  # the call, which arguments are multiples, which are zero


def _one(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    return len(where) == 1


def _all(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    """Sums, of multiples alone; a number is none."""
    numbers = [argument for argument in node.args if isinstance(argument, (int, float))]
    return bool(where) and not numbers and all(i in where or is_zero for i, is_zero in enumerate(zero))


def _chosen(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    """One of two by a condition, which is known."""
    return bool(where) and 0 not in where and all(i in where or zero[i] for i in range(1, len(zero)))


def _placed(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    """Elements put into others, at known places."""
    first, *index, last = range(len(zero))
    return not set(index) & set(where) and bool(where) and all(i in where or zero[i] for i in (first, last))


def _filled(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    value: Any = node.args[2]
    return where == [0] and (value == 0 or (isinstance(value, fx.Node) and _is_zero(value)))


def _padded(node: fx.Node, where: list[int], zero: list[bool]) -> bool:
    value: Any = node.args[2] if len(node.args) > 2 else 0
    return where == [0] and bool(value == 0)


_LINEAR = {
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.neg.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.select.int,
    aten.gather.default,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten._log_softmax_backward_data.default,
    aten._softmax_backward_data.default,
}
_RULES: dict[Any, _Rule] = {
    aten.mul.Tensor: _one,
    aten.mm.default: _one,
    aten.bmm.default: _one,
    WIDE_PRODUCT: _one,
    aten.add.Tensor: _all,
    aten.sub.Tensor: _all,
    aten.where.self: _chosen,
    aten.scatter.src: _placed,
    aten.scatter_add.default: _placed,
    aten.slice_scatter.default: _placed,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten.constant_pad_nd.default: _padded,
}
