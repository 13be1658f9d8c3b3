"""Wider copies that a bucket can do without: concatenation casts as it copies, to the widest dtype that it is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx.added_calls import Calls

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_COPIES = (aten._to_copy.default, aten.to.dtype)
COPIES_AND_VIEWS = _COPIES + _VIEWS


def without_casts(operands: Sequence[fx.Node], call: Calls) -> list[fx.Node]:
    """``operands``, those that are copies of narrower values as these values, as long as the widest dtype remains.

    All of a bucket have one dtype. Where every one of them is such a copy, the smallest stays what it is.
    """
    narrow = [_narrower(operand, call) for operand in operands]
    if None not in narrow:
        smallest = min(range(len(operands)), key=lambda position: _value(operands[position]).numel())
        narrow[smallest] = None
    return [operand if source is None else source for operand, source in zip(operands, narrow, strict=True)]


def _narrower(operand: fx.Node, call: Calls) -> fx.Node | None:
    """The value that ``operand`` is a wider copy of, in its shape, or None."""
    node = operand
    while node.target in _VIEWS:
        node = _source(node)
    if node.target not in _COPIES:
        return None
    source, value = _source(node), _value(operand)
    if not _is_narrower(_value(source), value) or not _value(source).is_contiguous():
        return None
    return call.view(source, list(value.shape))


def _is_narrower(source: Tensor, copy: Tensor) -> bool:
    """Whether concatenation widens ``source`` to what ``copy`` is, without loss."""
    return (
        source.device == copy.device
        and source.dtype != copy.dtype
        and source.dtype.is_floating_point
        and torch.promote_types(source.dtype, copy.dtype) == copy.dtype
    )


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
