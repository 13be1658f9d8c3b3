"""Calls that may write their result where an argument lies, because nobody reads that any more."""

from __future__ import annotations

import torch
from torch import fx

from lightning_autoparallel.torch_compat.rank_operators import ADD_PRODUCT, WIDE_PRODUCT

_PRODUCTS = {torch.ops.aten.mm.default, WIDE_PRODUCT, ADD_PRODUCT}


def adds_in_place(node: fx.Node) -> bool:
    """Whether the call adds a product to a sum of products that nothing else reads: the sum can stay where it lies."""
    if node.target is not ADD_PRODUCT:
        return False
    left, right, total = node.args
    assert isinstance(total, fx.Node)
    is_sum = total.op == "call_function" and total.target in _PRODUCTS
    return is_sum and set(total.users) == {node} and total not in (left, right)
