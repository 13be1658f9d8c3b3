"""Hooks of gradients and of optimizers' steps compute with shards as one device does with whole tensors.

Autograd and optimizers call them where no function mode of a step or a hook is open, and torch's own rules for shards
lose what is written into a part (``gradient[0].zero_()``), and mix none with plain tensors (``gradient * mask``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.pipeline.owed_gradients import cut_like
from lightning_autoparallel.pipeline.sharded_updates import ShardedUpdates
from lightning_autoparallel.torch_compat.autograd import hooks_replaced


def hooks_on_shards(
    holders: Iterable[Tensor | Optimizer], meet: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """While it is open, hooks of these parameters, or optimizers, run inside of ``ShardedUpdates``.

    Where a call of theirs computes with what other ranks hold, they ``meet`` first.
    """
    return hooks_replaced(holders, partial(_on_shards, meet))


def _on_shards(meet: Callable[[str], None], hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook, updated=())
    def on_shards(*args: Any) -> Any:
        with ShardedUpdates(meet):
            result = hook(*args)
        given = args[0]
        return _as_it_lies(result, given) if isinstance(given, DTensor) and isinstance(result, Tensor) else result

    return on_shards


@torch.no_grad()
def _as_it_lies(gradient: Tensor, given: DTensor) -> Tensor:
    """A hook's gradient in the place of the one that it was given."""
    if not isinstance(gradient, DTensor):
        return cut_like(gradient, given) if gradient.shape == given.shape else gradient
    if gradient.placements == given.placements:
        return gradient
    return gradient.redistribute(given.device_mesh, given.placements)
