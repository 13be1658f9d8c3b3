"""An operator that marks a value, and the gradient of that value, in a traced graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


# Annotations would not do: torch copies those of forward nodes to backward nodes by sequence numbers, and neighbours
# may share one. What a node was called with cannot go astray.
@torch.library.custom_op("lightning_autoparallel::edge", mutates_args=())
def _edge(x: Tensor, name: str, number: int) -> Tensor:
    return x.clone()


@_edge.register_fake
def _(x: Tensor, name: str, number: int) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _remember(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    ctx.name, ctx.number = inputs[1:]


def _mark_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return EDGE(gradient, ctx.name, ctx.number), None, None


_edge.register_autograd(_mark_gradient, setup_context=_remember)

EDGE = torch.ops.lightning_autoparallel.edge.default
"""``EDGE(x, name, number)`` is ``x`` (any shape, floating-point); its gradient passes a call of the same arguments."""
