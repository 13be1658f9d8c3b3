"""Reduce-scatters of a product, or of a sum of products: what goes to one rank can be computed by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.cuts import Cut, ahead, moves
from lightning_autoparallel.passes.decompose.gathers import PARTIAL, NotDecomposable
from lightning_autoparallel.passes.decompose.product_parts import Product, product_of

aten = torch.ops.aten

_REDUCTIONS = ("sum", "avg")


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """A reduce-scatter; ``cuts`` has every value between it and its ``products``, those included."""

    node: fx.Node
    scattered: fx.Node
    averages: bool
    ranks: int
    group: str
    cuts: dict[fx.Node, Cut]
    products: tuple[Product, ...]

    @property
    def of_parameter(self) -> bool:
        """Whether it only leaves the graph: a gradient's reduction, which is waited for at the end."""
        return fxn.collective_role(self.node) == fxn.TERMINAL_REDUCTION

    @property
    def waits(self) -> list[fx.Node]:
        """The calls that wait for it."""
        return list(self.node.users)


def scatters_products(node: fx.Node) -> bool:
    """Whether the collective is a reduce-scatter of what comes from a product by moves and sums alone."""
    return fxn.collective_kind(node) == "reduce_scatter" and _leads_to_product(node.all_input_nodes[0])


def _leads_to_product(node: fx.Node) -> bool:
    """Whether a product is behind ``node``; sums may be a residual stream, which is as deep as the model."""
    ahead_of, seen = [node], {node}
    while ahead_of:
        node = ahead_of.pop()
        if product_of(node) is not None:
            return True
        if moves(node) or _is_sum(node):
            unseen = [source for source in node.all_input_nodes if source not in seen]
            seen.update(unseen)
            ahead_of += unseen
    return False


def read_scatter(node: fx.Node) -> Scatter:
    """The reduce-scatter ``node`` and the products that make what it scatters.

    Raises:
        NotDecomposable: something else reads the product, or it cannot be made in parts.
    """
    scattered, reduce_op, ranks, group = node.args
    assert isinstance(scattered, fx.Node) and isinstance(ranks, int)
    if ranks < 2:
        raise NotDecomposable("one rank keeps it whole")
    if reduce_op not in _REDUCTIONS:
        raise NotDecomposable(f"parts cannot be added to its {reduce_op}")
    if not all(type(size) is int for size in scattered.meta["val"].shape):
        raise NotDecomposable("its shape is not static")
    if not node.users or not all(fxn.is_wait(user) for user in node.users):
        raise NotDecomposable("it is not waited for in this graph")
    cuts: dict[fx.Node, Cut] = {}
    rows = int(scattered.meta["val"].shape[0]) // ranks
    products = _follow(scattered, Cut(dim=0, outer=1, inner=rows), ranks, cuts)
    return Scatter(
        node=node,
        scattered=scattered,
        averages=reduce_op == "avg",
        ranks=ranks,
        group=str(group),
        cuts=cuts,
        products=tuple(products),
    )


def _follow(scattered: fx.Node, cut: Cut, ranks: int, cuts: dict[fx.Node, Cut]) -> list[Product]:
    """The products that ``scattered`` is made of, in their order; fills ``cuts``."""
    products: list[Product] = []
    ahead_of = [(scattered, cut)]
    while ahead_of:
        node, cut = ahead_of.pop()
        if len(node.users) != 1:
            raise NotDecomposable(f"{fxn.call_of(node)} is read by others too")
        cuts[node] = cut
        product = product_of(node)
        if product is not None:
            if node.meta.get(PARTIAL):
                raise NotDecomposable(f"{fxn.call_of(node)} is a part of a product that is decomposed already")
            products.append(product)
        elif moves(node):
            found = ahead(node, cut, ranks)
            if found is None:
                raise NotDecomposable(f"{fxn.call_of(node)} mixes the parts of ranks")
            ahead_of.append((node.all_input_nodes[0], found))
        elif _is_sum(node):
            ahead_of += [(addend, cut) for addend in reversed(node.all_input_nodes)]
        else:
            raise NotDecomposable(f"{fxn.call_of(node)} is no product, nor a sum of products")
    return products


def _is_sum(node: fx.Node) -> bool:
    """Whether the node adds two different values of its own shape."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return all(addend.meta["val"].shape == node.meta["val"].shape for addend in node.all_input_nodes)
