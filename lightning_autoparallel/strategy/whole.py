"""Parameters in shards -> whole ones for a while, with what optimizers hold of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_autoparallel.apply import rebind
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.strategy.steps import LightningSteps


@contextlib.contextmanager
def made_whole(engine: StepEngine, steps: LightningSteps, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, the engine's module holds whole parameters; then shards again, with their gradients, and no captures."""
    steps.reduce_gradients()
    shards = list(engine.module.parameters())
    gradients, now = [parameter.grad for parameter in shards], {"params": list(shards)}
    engine.gather_parameters()
    _follow(engine, optimizers, now)
    try:
        yield
    finally:
        engine.forget_captures()
        steps.forget_captures()
        engine.shard_parameters()
        _follow(engine, optimizers, now)
        for parameter, gradient in zip(now["params"], gradients, strict=True):
            parameter.grad = gradient


def _follow(engine: StepEngine, optimizers: Iterable[Optimizer], others: dict[str, Any]) -> None:
    """Rebind to what is in the module; what optimizers keep stays, to be used when parameters are in shards again."""
    for optimizer in optimizers:
        rebind(optimizer, engine.replacements, lambda parameter, key, value: value)
    engine.replacements.rebind([others])
