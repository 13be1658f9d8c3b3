"""What attention's backward is given in the layout in which the forward makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter

aten = torch.ops.aten

_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_OUT = 5


def in_kernels_layout(emitter: GraphEmitter, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The local arguments of a call; of efficient attention the forward's (B, H, T, D) lies in memory as (B, T, H, D).

    The kernel of the backward asks for no strides of it: it takes this order for granted, and a result that has come
    from other shards, or is a part of the whole, gives it wrong gradients.
    """
    if target is not _EFFICIENT_BACKWARD:
        return args
    return (*args[:_OUT], _packed(emitter, args[_OUT]), *args[_OUT + 1 :])


def _packed(emitter: GraphEmitter, out: fx.Node) -> fx.Node:
    if out.meta["val"].transpose(1, 2).is_contiguous():
        return out
    rows_first = emitter.contiguous(emitter.call(aten.transpose.int, out, 1, 2))
    return emitter.call(aten.transpose.int, rows_first, 1, 2)
