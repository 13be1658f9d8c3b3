"""Matrix products, and the parts of them that one rank's part of an operand gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.passes.decompose.cuts import Cut
from lightning_autoparallel.torch_compat.rank_operators import WIDE_PRODUCT

aten = torch.ops.aten

Side = Literal["left", "right"]
Kind = Literal["rows", "columns", "batch", "contracting"]
# A value of which a rank's chunk is wanted, and the cut that says which chunks there are.
Chunk = Callable[[Calls, fx.Node, Cut], fx.Node]

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


@dataclass(frozen=True, kw_only=True)
class Product:
    """``left @ right``, plus ``bias`` where there is one."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None

    @property
    def is_batch(self) -> bool:
        """Whether it multiplies batches of matrices."""
        return self.node.target is aten.bmm.default

    def operand(self, side: Side) -> fx.Node:
        """One of the two that are multiplied."""
        return self.left if side == "left" else self.right


def product_of(node: fx.Node) -> Product | None:
    """The product that ``node`` computes; None if it computes another thing, or scales what it adds."""
    if node.op != "call_function" or node.target not in _PRODUCTS or node.kwargs:
        return None
    if not all(isinstance(argument, fx.Node) for argument in node.args):
        return None
    *bias, left, right = node.args
    return Product(node=node, left=left, right=right, bias=bias[0] if bias else None)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class CutProduct:
    """A product, one operand of which is known by rank's parts only."""

    product: Product
    side: Side
    cut: Cut  # of that operand

    @property
    def kind(self) -> Kind:
        """What the parts are of the product: some of its rows, columns or batches, or addends of all of it."""
        first = int(self.product.is_batch)
        if self.product.is_batch and self.cut.dim == 0:
            return "batch"
        if self.side == "left":
            return "rows" if self.cut.dim == first else "contracting"
        return "contracting" if self.cut.dim == first else "columns"

    @property
    def result_cut(self) -> Cut:
        """The cut of the result; not for contracting ones."""
        last = self.product.node.meta["val"].dim() - 1
        dim = {"batch": 0, "rows": last - 1, "columns": last}[self.kind]
        return Cut(dim=dim, outer=self.cut.outer, inner=self.cut.inner)

    @property
    def cut_dims(self) -> tuple[int | None, int | None]:
        """The dims of the left and the right operand of which a part has only a rank's share."""
        dim = self.cut.dim
        other = {"batch": 0, "contracting": self._contracted().dim}.get(self.kind)
        return (dim, other) if self.side == "left" else (other, dim)

    @property
    def others(self) -> list[fx.Node]:
        """What else it reads."""
        other = self.product.right if self.side == "left" else self.product.left
        return [other] if self.product.bias is None else [other, self.product.bias]

    def part(self, call: Calls, part: fx.Node, chunk: Chunk) -> fx.Node:
        """The product of one rank's part; ``chunk`` gives that rank's part of what else is read.

        Addends are in float32 where the product is narrower, and without the bias.
        """
        other = self.others[0]
        if self.kind == "batch":
            other = chunk(call, other, Cut(dim=0, outer=self.cut.outer, inner=self.cut.inner))
        elif self.kind == "contracting":
            other = chunk(call, other, self._contracted())
        pair = (part, other) if self.side == "left" else (other, part)
        if self.kind != "contracting":
            return self._biased(call, pair, chunk)
        if is_narrow(self.product.node.meta["val"].dtype):
            return call(WIDE_PRODUCT, *pair)
        return call(aten.bmm.default if self.product.is_batch else aten.mm.default, *pair)

    def _biased(self, call: Calls, pair: tuple[fx.Node, fx.Node], chunk: Chunk) -> fx.Node:
        if self.product.bias is None:
            return call(self.product.node.target, *pair)
        return call(self.product.node.target, bias_part(call, self.product, self.result_cut, chunk), *pair)

    def _contracted(self) -> Cut:
        """The cut of the other operand."""
        first = int(self.product.is_batch)
        return Cut(dim=first if self.side == "left" else first + 1, outer=self.cut.outer, inner=self.cut.inner)

    def finished(self, call: Calls, total: fx.Node) -> fx.Node:
        """The whole product of the sum of its addends: with the bias, in its own dtype."""
        dtype = self.product.node.meta["val"].dtype
        bias = self.product.bias
        if bias is not None:
            total = call(aten.add.Tensor, total, cast(call, bias, total.meta["val"].dtype))
        return cast(call, total, dtype)


def bias_part(call: Calls, product: Product, cut: Cut, chunk: Chunk) -> fx.Node:
    """What of the bias is added where a product is cut so."""
    bias, shape = product.bias, product.node.meta["val"].shape
    assert bias is not None
    dim = cut.dim - len(shape) + bias.meta["val"].dim()  # of the bias, whose last dims are those of the product
    if dim < 0 or bias.meta["val"].shape[dim] != shape[cut.dim]:
        return bias
    return chunk(call, bias, Cut(dim=dim, outer=cut.outer, inner=cut.inner))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums of this dtype are kept in float32."""
    return dtype in (torch.bfloat16, torch.float16)


def cast(call: Calls, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The value in ``dtype``."""
    value: Tensor = node.meta["val"]
    return node if value.dtype == dtype else call(aten._to_copy.default, node, dtype=dtype)
