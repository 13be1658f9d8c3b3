"""Fused optimizers read parameter, gradient and state by one index: on this rank, too, all must lie alike.

Torch sees to it for plain tensors, where a gradient is added up; of DTensors it sees the strides of the whole only.
Gradients that a hook returns and state that a checkpoint holds may be cut otherwise than parameters were.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.dtensors import as_parameter_lies


def lay_out_for_fused(optimizer: Optimizer) -> None:
    """Have gradients and state of fused groups lie as their parameters do, before the optimizer reads them.

    What lies otherwise as a whole is left: that is what one device would be given, too.
    """
    for parameter in _shards_with_gradients(optimizer):
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and _is_cut_like(parameter, gradient):
            laid_out = as_parameter_lies(parameter, gradient)
            if laid_out is not gradient:
                parameter.grad = laid_out
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, DTensor) and _is_cut_like(parameter, value):
                state[name] = as_parameter_lies(parameter, value)


def _shards_with_gradients(optimizer: Optimizer) -> Iterator[DTensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                yield parameter


def _is_cut_like(parameter: DTensor, other: DTensor) -> bool:
    return other.placements == parameter.placements and other.stride() == parameter.stride()
