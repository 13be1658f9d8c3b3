"""Fused optimizers read parameter, gradient and state by one index: on this rank, too, all must lie alike.

Torch sees to it for plain tensors, where a gradient is added up; of DTensors it sees the strides of the whole only.
Gradients that a hook returns and state that a checkpoint holds may be cut otherwise than parameters were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.dtensors import as_parameter_lies, lies_as


def lay_out_for_fused(optimizer: Optimizer) -> None:
    """Have gradients and state of fused groups lie as their parameters do, before the optimizer reads them.

    What lies otherwise as a whole is left: that is what one device would be given, too.
    """
    for parameter in _shards_with_gradients(optimizer):
        gradient = parameter.grad
        if _lies_otherwise(gradient, parameter):
            parameter.grad = as_parameter_lies(parameter, gradient)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if _lies_otherwise(value, parameter):
                state[name] = as_parameter_lies(parameter, value)


def _shards_with_gradients(optimizer: Optimizer) -> Iterator[DTensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                yield parameter


def _lies_otherwise(other: Any, parameter: DTensor) -> TypeGuard[DTensor]:
    """Whether one is cut as its parameter, with its strides as a whole, and this rank's part has others."""
    if not isinstance(other, DTensor) or lies_as(parameter, other):
        return False
    return other.placements == parameter.placements and other.stride() == parameter.stride()
