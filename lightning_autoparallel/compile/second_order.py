"""Gradients that are to be differentiated again: the module runs once more as it is, on whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.torch_compat.autograd import final
from lightning_autoparallel.torch_compat.dtensors import as_parameter_lies

OF_PARAMETERS = (
    "in forward mode only gradients of inputs can be; a step that is captured whole (automatic_optimization=True) "
    "differentiates those of parameters again, too"
)
_AGAIN = f"the gradient of a parameter of a captured module is differentiated again: {OF_PARAMETERS}"
# The graph's inputs, whole -> its outputs but gradients, recorded by autograd; None for buffers.
Again = Callable[[Sequence[Tensor]], list[Tensor | None]]


def gradients_again(
    again: Again,
    axes: Sequence[PlanAxis],
    inputs: Sequence[Tensor],
    differentiable: Sequence[int],
    tangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``inputs``, recorded by autograd but for those of parameters; None where there is none.

    ``tangents`` are those of the outputs at ``differentiable``, of all that are no gradients.

    What is differentiated again reaches parameters through their gathers, as the mean over the batch shards.
    """
    with torch.enable_grad():
        # As views: one tensor may be given twice, and what is done to gradients of the whole is not done to these.
        whole = [_whole(tensor, axes).view_as(tensor) for tensor in inputs]
        results = again(whole)
        pairs = [(_recorded(results[i]), tangents[i]) for i in differentiable if tangents[i] is not None]
        wanted = [tensor for tensor in whole if tensor.requires_grad]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            wanted,
            [tangent for _, tangent in pairs],
            create_graph=True,
            allow_unused=True,
        )
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
    return [
        _reduced(by_tensor.get(id(one)), tensor, axes) if isinstance(tensor, DTensor) else by_tensor.get(id(one))
        for one, tensor in zip(whole, inputs, strict=True)
    ]


def _recorded(result: Tensor | None) -> Tensor:
    assert result is not None
    return result


def _whole(parameter: Tensor, axes: Sequence[PlanAxis]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    whole = parameter.full_tensor(grad_placements=_own(parameter, axes))
    shards = _shards(axes)
    if whole.requires_grad and shards > 1:
        whole.register_hook(lambda gradient: gradient / shards)
    return whole


def _reduced(gradient: Tensor | None, parameter: DTensor, axes: Sequence[PlanAxis]) -> Tensor | None:
    """The mean over the batch shards where the parameter lies."""
    if gradient is None:
        return None
    with torch.no_grad():
        own = DTensor.from_local(gradient / _shards(axes), parameter.device_mesh, _own(parameter, axes))
        reduced = as_parameter_lies(parameter, own.redistribute(placements=parameter.placements))
    return final(reduced, gradient, _AGAIN)


def _own(parameter: DTensor, axes: Sequence[PlanAxis]) -> tuple[Placement, ...]:
    """The placements of a gradient that each rank has computed from its rows; single processes have no axes."""
    if not axes:
        return (Replicate(),) * parameter.device_mesh.ndim
    return tuple(Partial() if axis.shards_batch else Replicate() for axis in axes)


def _shards(axes: Sequence[PlanAxis]) -> int:
    return math.prod(axis.size for axis in axes if axis.shards_batch)
