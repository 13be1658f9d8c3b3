"""Matrix products of flattened values as einsums of the values themselves.

Torch computes a linear layer of ``(B, T, K)`` as ``view(B*T, K) -> mm -> view(B, T, N)``. A shard of T would be a
strided shard of B*T, so for planning the product keeps its dims: ``einsum("abc,dc->abd", [x, w])``. An einsum made here
has two operands, no ellipsis and no letter twice in one operand; lowering takes it apart into views and ``mm`` again.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.torch_compat.tracing import fake_mode_of
from lightning_autoparallel.torch_compat.viewable import can_be_viewed

aten = torch.ops.aten

_SWAPS = {aten.t.default, aten.transpose.int, aten.permute.default}
_PRODUCTS = {aten.mm.default, aten.addmm.default}
_REWRITTEN = {*_SWAPS, *_PRODUCTS, aten.view.default, aten._to_copy.default, aten.sum.dim_IntList}


def unflatten_products(graph: fx.Graph) -> None:
    """Rewrite, in place, every ``mm``, ``addmm`` and bias sum of a flattened value; the program stays the same.

    Transposes of transposes and views of views go on the way, so that no 2-D view stays around a rewritten product.
    """
    _each(graph, _drop_transpose)
    _each(graph, _cast_before_flattening)
    _erase_unused(graph)  # a transpose without users would look like one that wants the product transposed
    _each(graph, _rewrite_product)
    _each(graph, _rewrite_sum)
    _each(graph, _cast_before_flattening)
    _erase_unused(graph)
    _each(graph, _shorten_view)
    _erase_unused(graph)


def _each(graph: fx.Graph, rewrite: Callable[[fx.Node], None]) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function":
            rewrite(node)


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node.target in _REWRITTEN:
            graph.erase_node(node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _is_swap(node: Any) -> bool:
    """Whether the node exchanges the two dims of a matrix."""
    if not isinstance(node, fx.Node) or node.target not in _SWAPS or len(_shape(node)) != 2:
        return False
    dims: Any = node.args[1:]
    if node.target is aten.permute.default:
        return bool(dims[0][0] % 2)
    return node.target is aten.t.default or dims[0] % 2 != dims[1] % 2


def _drop_transpose(node: fx.Node) -> None:
    if _is_swap(node) and _is_swap(_source(node)):
        node.replace_all_uses_with(_source(_source(node)))


def _cast_before_flattening(node: fx.Node) -> None:
    """Autocast casts what the user flattened: the other way round the product finds the value it is made of."""
    if node.target is not aten._to_copy.default or len(_shape(node)) != 2 or "memory_format" in node.kwargs:
        return
    base = _flattened(_source(node))
    if base is None:
        return
    with node.graph.inserting_before(node):
        _replace(node, _call(node, node.target, (base,), _shape(base), dict(node.kwargs)))


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A matrix as the value it is made of: the sizes of the dims that are its rows and of those that are its columns.

    The value has the dims of the rows first, or, if ``transposed``, those of the columns.
    """

    node: fx.Node
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool = False

    @property
    def is_flattened(self) -> bool:
        return len(self.rows) + len(self.columns) > 2

    def turned(self) -> _Matrix:
        """The transposed matrix, of the same value."""
        return replace(self, rows=self.columns, columns=self.rows, transposed=not self.transposed)

    def with_rows(self, rows: tuple[int, ...]) -> _Matrix:
        """The same matrix, its rows taken apart."""
        assert not self.is_flattened
        shape = (*self.columns, *rows) if self.transposed else (*rows, *self.columns)
        return replace(self, node=_view(self.node, shape), rows=rows)

    def subscripts(self, rows: str, columns: str) -> str:
        """The letters of the value's dims, given those of rows and columns."""
        return columns + rows if self.transposed else rows + columns


def _matrix(node: fx.Node, transposed: bool = False) -> _Matrix:
    if _is_swap(node):
        return _matrix(_source(node), not transposed)
    base = _flattened(node) or node
    *rows, columns = _shape(base)
    matrix = _Matrix(node=base, rows=tuple(rows), columns=(columns,))
    return matrix.turned() if transposed else matrix


def _flattened(node: fx.Node) -> fx.Node | None:
    """The nearest value of three or more dims of which a 2-D view merges all but the last.

    Where it merges trailing dims too (attention's heads), the value with only those merged.
    """
    base = node
    while base.target is aten.view.default:
        base = _source(base)
        rows, columns = _shape(node)
        leading = _leading(_shape(base), rows)
        if leading:
            with node.graph.inserting_before(node):
                return _view(base, (*_shape(base)[:leading], columns), origin=node)
    return None


def _leading(shape: tuple[int, ...], rows: int) -> int:
    """How many leading dims, two or more, make up the rows; 0 if none do."""
    counts = reversed(range(2, len(shape)))
    return next((count for count in counts if math.prod(shape[:count]) == rows), 0)


def _plain(matrix: _Matrix, node: fx.Node) -> _Matrix:
    """The matrix as the 2-D ``node`` itself."""
    rows, columns = _shape(node)
    return _Matrix(node=node, rows=(rows,), columns=(columns,)) if matrix.is_flattened else matrix


def _rewrite_product(node: fx.Node) -> None:
    if node.target not in _PRODUCTS or node.kwargs:  # alpha and beta, where they are not 1
        return
    *bias, left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    first, second = _matrix(left), _matrix(right)
    if not (first.is_flattened or second.is_flattened):
        if bias:
            _take_bias_apart(node, bias[0])
        return
    with node.graph.inserting_before(node):
        first, second = _contractable(first, second, right)
        if bias:
            _replace(node, _add_bias(node, _einsum(node, first, second), bias[0]))
        elif node.users and all(_is_swap(user) for user in node.users):
            product = _einsum(node, second.turned(), first.turned())
            for user in list(node.users):
                _replace(user, product)
        else:
            _replace(node, _einsum(node, first, second))


def _take_bias_apart(node: fx.Node, bias: Any) -> None:
    """A bias is added to the whole product: inside of ``addmm`` every rank that sums a part would add it too."""
    with node.graph.inserting_before(node):
        product = _call(node, aten.mm.default, tuple(node.args[1:]), _shape(node))
        _replace(node, _call(node, aten.add.Tensor, (product, bias), _shape(node)))


def _contractable(first: _Matrix, second: _Matrix, right: fx.Node) -> tuple[_Matrix, _Matrix]:
    """The matrices with the same dims in the first one's columns and the second one's rows."""
    if first.columns != second.rows and first.is_flattened:
        second = _plain(second, right)
    if first.columns == second.rows:
        return first, second
    if len(second.rows) == 1:
        return first, second.with_rows(first.columns)
    return first.turned().with_rows(second.rows).turned(), second


def _einsum(product: fx.Node, first: _Matrix, second: _Matrix) -> fx.Node:
    sizes = len(first.rows), len(first.columns), len(second.columns)
    letters = iter(string.ascii_lowercase)
    rows, inner, columns = ("".join(next(letters) for _ in range(size)) for size in sizes)
    written = f"{first.subscripts(rows, inner)},{second.subscripts(inner, columns)}->{rows}{columns}"
    shape = (*first.rows, *second.columns)
    return _call(product, aten.einsum.default, (_renamed(written), [first.node, second.node]), shape)


def _renamed(equation: str) -> str:
    """The equation with its letters in the order of the alphabet: equal products are written alike."""
    seen = dict.fromkeys(letter for letter in equation if letter.isalpha())
    return equation.translate({ord(old): new for old, new in zip(seen, string.ascii_lowercase, strict=False)})


def _add_bias(product: fx.Node, einsum: fx.Node, bias: Any) -> fx.Node:
    whole = bias.meta["val"].dim() > 1 or _shape(einsum)[-1] != _shape(product)[-1]
    summand = _view(einsum, _shape(product)) if whole else einsum
    return _call(product, aten.add.Tensor, (summand, bias), _shape(summand))


def _rewrite_sum(node: fx.Node) -> None:
    """The gradient of a bias: a sum over the rows of a flattened value is one over its leading dims."""
    if node.target is not aten.sum.dim_IntList or len(_shape(_source(node))) != 2:
        return
    base, dims = _flattened(_source(node)), node.args[1]
    if base is None or dims not in ([0], [-2]):
        return
    with node.graph.inserting_before(node):
        leading = list(range(len(_shape(base)) - 1))
        summed = _call(node, aten.sum.dim_IntList, (base, leading), _shape(base)[-1:], dict(node.kwargs))
        _replace(node, summed)


def _shorten_view(node: fx.Node) -> None:
    if node.target is not aten.view.default:
        return
    base = _source(node)
    if base.target is aten.view.default and can_be_viewed(_source(base).meta["val"], _shape(node)):
        node.args = (_source(base), list(_shape(node)))
    if _shape(_source(node)) == _shape(node):
        node.replace_all_uses_with(_source(node))


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(_view(by, _shape(node), origin=node))


def _view(node: fx.Node, shape: tuple[int, ...], origin: fx.Node | None = None) -> fx.Node:
    if _shape(node) == shape:
        return node
    made, value = _call(origin or node, aten.view.default, (node, list(shape)), shape), node.meta["val"]
    if not value.is_contiguous():
        with fake_mode_of(value):
            made.meta["val"] = value.view(shape)
    return made


def _call(
    origin: fx.Node, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A dense value of ``shape``, of the dtype and with the annotations of ``origin``."""
    replaced = origin.meta["val"]
    made = origin.graph.call_function(target, args, kwargs, name=target.overloadpacket.__name__)
    made.meta = {key: value for key, value in origin.meta.items() if key != "tensor_meta"}
    made.meta["custom"] = dict(origin.meta.get("custom") or {})
    with fake_mode_of(replaced):
        made.meta["val"] = torch.empty(shape, dtype=replaced.dtype, device=replaced.device)
    return made
