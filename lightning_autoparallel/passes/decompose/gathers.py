"""All-gathers of which nobody needs the whole: products read them, by way of views and casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing.moves import moving_with
from lightning_autoparallel.passes.decompose.cuts import Cut, behind, moves
from lightning_autoparallel.passes.decompose.product_parts import CutProduct, product_of

aten = torch.ops.aten

PARTIAL = "partial_product"  # meta of products that a decomposition wrote


class NotDecomposable(Exception):
    """Why a collective must stay whole, as the report says it."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """An all-gather and the products that read it, in the graph's order.

    ``cuts`` holds those of the gathered value and of everything that moves made of it.
    """

    node: fx.Node
    shard: fx.Node
    ranks: int
    group: str
    cuts: dict[fx.Node, Cut]
    products: tuple[CutProduct, ...]

    @property
    def of_parameter(self) -> bool:
        """Whether it depends on a parameter only: it may start long before it is needed."""
        return fxn.collective_role(self.node) == fxn.PARAMETER_GATHER


def feeds_products(node: fx.Node) -> bool:
    """Whether the collective is an all-gather that some product reads: all of it, or what is left without padding."""
    if fxn.collective_kind(node) != "all_gather":
        return False
    readers = list(_readers(node))
    cut = [reader for padded in readers if padded.target is aten.slice.Tensor for reader in _readers(padded)]
    return any(product_of(reader) for reader in readers + cut)


def read_gather(node: fx.Node) -> Gather:
    """The all-gather ``node`` and the products that it is needed for.

    Raises:
        NotDecomposable: something else needs the whole, or one of the products cannot be made in parts.
    """
    shard, ranks, group = node.args
    assert isinstance(shard, fx.Node) and isinstance(ranks, int)
    if ranks < 2:
        raise NotDecomposable("one rank has it whole")
    if not all(type(size) is int for size in node.meta["val"].shape):
        raise NotDecomposable("its shape is not static")
    cuts = {node: Cut(dim=0, outer=1, inner=int(shard.meta["val"].shape[0]))}
    products: list[CutProduct] = []
    for source in _moved(node):
        for reader in source.users:
            if moves(reader):
                found = behind(reader, cuts[source], ranks)
                if found is None:
                    raise NotDecomposable(f"{fxn.call_of(reader)} mixes the parts of ranks")
                cuts[reader] = found
            else:
                products.append(_product(reader, source, cuts[source]))
    products.sort(key=lambda one: one.product.node)
    _check_order(node, products)
    return Gather(node=node, shard=shard, ranks=ranks, group=str(group), cuts=cuts, products=tuple(products))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for source in _moved(node):
        yield from (reader for reader in source.users if not moves(reader))


def _moved(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and every move of it, each behind its argument."""
    pending = [node]
    while pending:
        source = pending.pop(0)
        yield source
        pending.extend(user for user in source.users if moves(user))


def _product(reader: fx.Node, source: fx.Node, cut: Cut) -> CutProduct:
    if reader.op == "output":
        raise NotDecomposable("the graph returns it whole: a value that is kept, or a result")
    product = product_of(reader)
    if product is None:
        raise NotDecomposable(f"{fxn.call_of(reader)} needs it whole")
    if reader.meta.get(PARTIAL):
        raise NotDecomposable(f"{fxn.call_of(reader)} is a part of a product that is decomposed already")
    if (product.left is source) == (product.right is source) or product.bias is source:
        raise NotDecomposable(f"{fxn.call_of(reader)} reads it more than once, or adds it")
    return CutProduct(product=product, side="left" if product.left is source else "right", cut=cut)


def _check_order(gather: fx.Node, products: list[CutProduct]) -> None:
    """What else the products read must be there before any of them runs."""
    depending = _depending(gather, products[-1].product.node)
    others = [other for one in products for other in one.others]
    for other in others:
        if other in depending:
            raise NotDecomposable(f"{fxn.call_of(other)}, which it is multiplied with, depends on it")
    if any(fxn.is_random(node) for node in moving_with(others, products[0].product.node)):
        raise NotDecomposable("what it is multiplied with is drawn at random behind it")


def _depending(source: fx.Node, last: fx.Node) -> set[fx.Node]:
    """The calls up to ``last`` that depend on ``source``."""
    found: set[fx.Node] = set()
    pending = [source]
    while pending:
        for user in pending.pop().users:
            if user not in found and user.op != "output" and not last < user:  # nodes compare by their place
                found.add(user)
                pending.append(user)
    return found
