"""Calls that compute some rows of their result from the same rows of what they read, or add up over rows.

Rows are followed as ``decompose.cuts`` follows the parts of ranks: a value with a cut holds, in one dim, those of
``chunks`` chunks. What has no such rows is read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.cuts import Cut, ahead, behind, moves
from lightning_autoparallel.passes.decompose.product_parts import CutProduct, product_of
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten

Operands = dict[fx.Node, Cut | None]  # None: read whole


@dataclass(frozen=True, kw_only=True)
class RowCall:
    """A call by rows: the cut of its ``result``, None where it adds up over rows, and those of what it reads."""

    result: Cut | None
    operands: Operands


def from_operand(node: fx.Node, operand: fx.Node, cut: Cut, chunks: int) -> RowCall | None:
    """``node`` by the rows of one of its operands; None where it cannot be called on some of them."""
    product = product_of(node)
    if product is not None:
        return _product_from(product, operand, cut)
    if node.target in _REDUCTIONS and cut.dim in _reduced(node):
        return RowCall(result=None, operands={operand: cut}) if node.target in _SUMS else None
    result = _behind(node, operand, cut, chunks)
    return None if result is None else from_result(node, result, chunks)


def from_result(node: fx.Node, cut: Cut, chunks: int) -> RowCall | None:
    """``node`` by the rows of its result; None where these do not come from the same rows of what it reads."""
    if node.op != "call_function" or fxn.is_random(node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    operands = _operands(node, cut, chunks)
    return None if operands is None else RowCall(result=cut, operands=operands)


def _behind(node: fx.Node, operand: fx.Node, cut: Cut, chunks: int) -> Cut | None:
    """The cut of the result, if there is one, of a call whose operand has this one."""
    if moves(node):
        return behind(node, cut, chunks)
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    before, after = operand.meta["val"].dim(), node.meta["val"].dim()
    if node.target in _REDUCTIONS:
        gone = 0 if before == after else sum(dim < cut.dim for dim in _reduced(node))
        return Cut(dim=cut.dim - gone, outer=cut.outer, inner=cut.inner)
    return Cut(dim=cut.dim + after - before, outer=cut.outer, inner=cut.inner)


def _operands(node: fx.Node, cut: Cut, chunks: int) -> Operands | None:
    product = product_of(node)
    if product is not None:
        side = {0: "left", 1: "right"}.get(cut.dim - (node.meta["val"].dim() - 2))
        return None if side is None else _of_side(node, cut)
    if moves(node):
        (source,) = node.all_input_nodes
        found = ahead(node, cut, chunks)
        return None if found is None else {source: found}
    if node.target in _REDUCTIONS:
        return _before_reduction(node, cut)
    along = _ALONG.get(node.target)  # type: ignore[call-overload]
    if along is not None:
        return _beside(node, cut, along(node))
    return _broadcast(node, cut) if _is_elementwise(node) else None


def _of_side(node: fx.Node, cut: Cut) -> Operands | None:
    """None where one value is two operands: its rows and all of it."""
    product = product_of(node)
    assert product is not None
    last = node.meta["val"].dim() - 1
    left, right = (cut, None) if cut.dim == last - 1 else (None, cut)
    if len(set(node.args)) < len(node.args):
        return None
    operands: Operands = {product.left: left, product.right: right}
    if product.bias is not None:
        operands[product.bias] = _aligned(product.bias, node, cut)
    return operands


def _product_from(product: Any, operand: fx.Node, cut: Cut) -> RowCall | None:
    if product.left is product.right or operand is product.bias or product.is_batch:
        return None
    part = CutProduct(product=product, side="left" if operand is product.left else "right", cut=cut)
    if part.kind != "contracting":
        operands = _of_side(product.node, part.result_cut)
        return None if operands is None else RowCall(result=part.result_cut, operands=operands)
    if product.bias is not None:
        return None
    other = Cut(dim=1 - cut.dim, outer=cut.outer, inner=cut.inner)
    return RowCall(result=None, operands={operand: cut, part.others[0]: other})


def _reduced(node: fx.Node) -> list[int]:
    """The dims that a reduction takes away, or leaves with one element."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    given: Any = node.args[1] if len(node.args) > 1 else None
    if given is None or given == []:
        return list(range(rank))
    return [dim % rank for dim in ([given] if isinstance(given, int) else given)]


def _before_reduction(node: fx.Node, cut: Cut) -> Operands | None:
    (source,) = node.all_input_nodes
    if node.meta["val"].dim() == source.meta["val"].dim():
        return {source: cut} if cut.dim not in _reduced(node) else None
    kept = [dim for dim in range(source.meta["val"].dim()) if dim not in _reduced(node)]
    return {source: Cut(dim=kept[cut.dim], outer=cut.outer, inner=cut.inner)}


def _beside(node: fx.Node, cut: Cut, dims: list[int]) -> Operands | None:
    """All operands cut as the result of a call that works along other ``dims``."""
    shape = node.meta["val"].shape
    operands = fxn.tensor_arguments(node)
    if cut.dim in dims or any(one.meta["val"].dim() != len(shape) for one in operands):
        return None
    fits = all(one.meta["val"].shape[cut.dim] == shape[cut.dim] for one in operands)
    return dict.fromkeys(operands, cut) if fits else None


def _broadcast(node: fx.Node, cut: Cut) -> Operands | None:
    return {operand: _aligned(operand, node, cut) for operand in node.all_input_nodes}


def _aligned(operand: fx.Node, node: fx.Node, cut: Cut) -> Cut | None:
    """The cut of what is broadcast to the shape of ``node``; None where every row reads all of it."""
    shape, given = node.meta["val"].shape, operand.meta["val"].shape
    dim = cut.dim - len(shape) + len(given)
    if dim < 0 or given[dim] != shape[cut.dim]:
        return None
    return Cut(dim=dim, outer=cut.outer, inner=cut.inner)


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in _ELEMENTWISE:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _argument(position: int) -> Callable[[fx.Node], list[int]]:
    """The dims that a call works along, where one argument says which."""

    def dims(node: fx.Node) -> list[int]:
        given: Any = node.args[position] if len(node.args) > position else 0
        return [given % node.meta["val"].dim()]

    return dims


def _padded(node: fx.Node) -> list[int]:
    pads: Any = node.args[1]
    last = node.meta["val"].dim() - 1
    return [last - index // 2 for index, pad in enumerate(pads) if pad]


_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_REDUCTIONS = _SUMS | {
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.any.dim,
    aten.all.dim,
}
_ELEMENTWISE = {
    aten.expand.default,
    aten.full.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
    collectives.ALL_REDUCE,
}
_ALONG: Mapping[Any, Callable[[fx.Node], list[int]]] = {
    aten._log_softmax.default: _argument(1),
    aten._softmax.default: _argument(1),
    aten._log_softmax_backward_data.default: _argument(2),
    aten._softmax_backward_data.default: _argument(2),
    aten.gather.default: _argument(1),
    aten.scatter.value: _argument(1),
    aten.scatter.src: _argument(1),
    aten.scatter_add.default: _argument(1),
    aten.slice.Tensor: _argument(1),
    aten.slice_backward.default: _argument(2),
    aten.slice_scatter.default: _argument(2),
    aten.constant_pad_nd.default: _padded,
}
