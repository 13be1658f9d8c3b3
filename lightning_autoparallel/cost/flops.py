"""FLOPs of the operators that are bound by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.rank_operators import ADD_PRODUCT, WIDE_PRODUCT
from lightning_autoparallel.torch_compat.schemas import named_arguments


def operator_flops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of the operators that torch's counter knows; 0 for the others, which are bound by memory."""
    if op is torch.ops.aten.einsum.default:
        return 2 * math.prod(_letter_sizes(*args).values())
    if op in (WIDE_PRODUCT, ADD_PRODUCT):
        return 2 * int(result.numel() * args[0].shape[-1])
    if fxn.is_attention_target(op):  # torch's counter knows no heads that share keys
        return _attention_flops(str(op), {**named_arguments(op, args, kwargs), "is_causal": False})
    packet = getattr(op, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def counts_flops(node: fx.Node) -> bool:
    """Whether the node is of those that FLOPs may bound: products, convolutions, attention."""
    is_product = node.target in (torch.ops.aten.einsum.default, WIDE_PRODUCT, ADD_PRODUCT)
    return is_product or fxn.is_attention(node) or getattr(node.target, "overloadpacket", None) in flop_registry


def node_flops(node: fx.Node) -> int:
    """FLOPs of a call on the shapes of ``meta["val"]``; causal attention skips the masked half."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if fxn.is_attention(node):
        return _attention_flops(str(node.target), named_arguments(node.target, args, kwargs))
    return operator_flops(node.target, args, kwargs, node.meta["val"])


def _attention_flops(name: str, arguments: Mapping[str, Any]) -> int:
    """Products of (batch, heads, query, width) with (batch, heads, key, width) and back.

    Forward: scores and their product with values. Backward: the scores again, then the gradients of values, scores,
    queries and keys (Dao et al. 2022, arXiv:2205.14135, app. B).
    """
    query, key, value = (arguments[operand].shape for operand in ("query", "key", "value"))
    pairs = math.prod(query[:-1]) * key[-2]
    if arguments.get("is_causal"):
        pairs //= 2
    width, value_width = query[-1], value[-1]
    per_pair = 3 * width + 2 * value_width if "backward" in name else width + value_width
    return int(2 * pairs * per_pair)


def _letter_sizes(equation: str, operands: Sequence[Tensor]) -> dict[str, int]:
    terms = equation.split("->")[0].split(",")
    return {
        letter: size
        for term, operand in zip(terms, operands, strict=True)
        for letter, size in zip(term, operand.shape, strict=True)
    }
