"""``join_biases``: a product and the bias added to it become one operator again.

Capture takes them apart, as a rank that sums a part of a product must not add the bias. Where a product is whole, one
operator rounds once, as on one device, where two would round twice; in bfloat16 that shows.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def join_biases(graph: fx.Graph) -> tuple[str, ...]:
    """Replace ``mm`` -> views -> ``add`` of a vector by ``addmm`` -> views; only products without other readers."""
    joined = 0
    for node in list(graph.nodes):
        product = _product_of(node)
        if product is None:
            continue
        bias = node.args[1]
        with graph.inserting_before(node):
            whole = graph.call_function(aten.addmm.default, (bias, *product.args))
        whole.meta = dict(product.meta)
        chain = _chain(node)
        for view in chain:
            node.prepend(view)  # behind the product, which waits for the bias
        if chain:
            chain[0].replace_input_with(product, whole)
        node.replace_all_uses_with(chain[-1] if chain else whole)
        graph.erase_node(node)
        graph.erase_node(product)
        joined += 1
    return (f"{joined} biases joined with their products",) if joined else ()


def _chain(node: fx.Node) -> list[fx.Node]:
    """The views between a product and ``node``, in the order of the graph."""
    chain: list[fx.Node] = []
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target is aten.view.default and len(source.users) == 1:
        chain.insert(0, source)
        source = source.args[0]
    return chain


def _product_of(node: fx.Node) -> fx.Node | None:
    """The ``mm`` that ``node`` adds a vector to, one addend per column of it."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    chain, bias = _chain(node), node.args[1]
    product = (chain[0] if chain else node).args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mm.default or len(product.users) != 1:
        return None
    if not isinstance(bias, fx.Node):
        return None
    result, addend = product.meta["val"], bias.meta["val"]
    fits = addend.dim() == 1 and addend.shape[0] == result.shape[1] == node.meta["val"].shape[-1]
    return product if fits and addend.dtype == result.dtype == node.meta["val"].dtype else None
