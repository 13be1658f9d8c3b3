"""Wider copies that a bucket can do without: concatenation casts as it copies, to the widest dtype that it is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx.added_calls import Calls

aten = torch.ops.aten

COPIES_AND_VIEWS = (aten._to_copy.default, aten.view.default)


def without_casts(operands: Sequence[fx.Node], call: Calls) -> list[fx.Node]:
    """``operands``, those that are copies of narrower values as these values, as long as the widest dtype remains.

    All of a bucket have one dtype. Where every one of them is such a copy, the smallest stays what it is.
    """
    sources = [_narrower(operand) for operand in operands]
    if None not in sources:
        smallest = min(range(len(operands)), key=lambda position: operands[position].meta["val"].numel())
        sources[smallest] = None
    return [
        operand if source is None else call.view(source, list(operand.meta["val"].shape))
        for operand, source in zip(operands, sources, strict=True)
    ]


def _narrower(operand: fx.Node) -> fx.Node | None:
    """What ``operand`` is a wider copy of, element by element in the same order, or None."""
    node = operand
    while node.target is aten.view.default:
        (node,) = node.all_input_nodes
    if node.target is not aten._to_copy.default:
        return None
    (source,) = node.all_input_nodes
    return source if _is_narrower(source.meta["val"], operand.meta["val"]) else None


def _is_narrower(source: Tensor, copy: Tensor) -> bool:
    """Whether concatenation widens ``source``, which lies row by row, to what ``copy`` is, without loss."""
    return (
        source.device == copy.device
        and source.dtype != copy.dtype
        and source.dtype.is_floating_point
        and source.is_contiguous()
        and torch.promote_types(source.dtype, copy.dtype) == copy.dtype
    )
