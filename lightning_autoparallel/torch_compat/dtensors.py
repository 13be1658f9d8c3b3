"""DTensors around what a rank holds already, by a description that is made once.

``DTensor.from_local`` describes the tensor anew each time, which is most of what it takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

Description = DTensorSpec


def described(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Description:
    """What a DTensor of this global ``shape`` and ``stride`` is, whatever is in it."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def around(local: Tensor, description: Description) -> DTensor:
    """A DTensor of this rank's part, which nobody else holds as it is, and no graph of gradients leads to."""
    assert not local.requires_grad and local.dtype == description.tensor_meta.dtype  # type: ignore[union-attr]
    # without ``__init__``, which does nothing, and is wrapped three times
    return DTensor.__new__(DTensor, local, description, requires_grad=False)


def is_copied(value: Any) -> bool:
    """Whether ``copied`` makes the copy that ``copy.deepcopy`` asks for."""
    is_own = isinstance(value, DTensor) and (value.is_leaf or not value.requires_grad)
    return is_own and not any(placement.is_partial() for placement in value.placements)


def copied(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """As ``copy.deepcopy`` copies plain parameters, which leave their gradients behind.

    Of DTensors torch copies gradients, too, and takes those that start behind their memory's beginning for tensors with
    memory of their own.
    """
    if id(tensor) not in memo:
        with torch.no_grad():
            values = tensor.clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        made = (
            nn.Parameter(values, tensor.requires_grad) if is_parameter else values.requires_grad_(tensor.requires_grad)
        )
        memo[id(tensor)] = made
    return memo[id(tensor)]  # type: ignore[no-any-return]


def part_of(tensor: DTensor) -> Tensor:
    """This rank's part itself, of which ``to_local`` makes a view: one for each parameter at each step."""
    return tensor._local_tensor


def laid_out_like(expected: Tensor, given: Tensor) -> Tensor:
    """``given`` with the strides of ``expected``, which is of its shape: itself, or a copy."""
    if given.stride() == expected.stride():
        return given
    laid_out = torch.empty_strided(expected.size(), expected.stride(), dtype=given.dtype, device=given.device)
    return laid_out.copy_(given)


def laid_out_as(parameter: Tensor | None, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient with the strides of its part of the parameter, as autograd has it.

    A DTensor's own strides say nothing of its part's. Fused optimizers read both by one index: on a GPU they refuse
    others, on a CPU they update other elements without a word. Parts of other shapes wait for their reduction, whose
    graph takes contiguous ones.
    """
    if not isinstance(parameter, DTensor) or (own := parameter._local_tensor).shape != gradient.shape:
        return gradient.contiguous()
    return gradient if own.stride() == gradient.stride() else laid_out_like(own, gradient)


def as_parameter_lies(parameter: DTensor, given: DTensor) -> DTensor:
    """``given``, placed as ``parameter`` is, whose part on this rank has the strides of the parameter's part.

    A DTensor's own strides say nothing of its part's: torch takes them from the parameter. Parts of different shapes
    are left as they are.
    """
    own, part = part_of(parameter), part_of(given)
    if own.shape != part.shape or (own.stride() == part.stride() and given.stride() == parameter.stride()):
        return given
    description = described(
        given.device_mesh, given.placements, tuple(given.shape), tuple(parameter.stride()), given.dtype
    )
    return around(laid_out_like(own, part).detach(), description)


def is_placed_alike(parameter: DTensor, other: Tensor | None) -> bool:
    """Whether ``other`` is cut as ``parameter`` is, and this rank's parts have one shape."""
    if not isinstance(other, DTensor):
        return False
    own, given = parameter._spec, other._spec
    if own is given:
        return True
    is_cut_alike = own.placements == given.placements and (own.mesh is given.mesh or own.mesh == given.mesh)
    return is_cut_alike and parameter._local_tensor.shape == other._local_tensor.shape


def has_strides_of(parameter: DTensor, other: DTensor) -> bool:
    """Whether the whole has the strides that the parameter has."""
    return other._spec.tensor_meta.stride == parameter._spec.tensor_meta.stride  # type: ignore[union-attr]


def lies_as(parameter: DTensor, other: DTensor) -> bool:
    """Whether ``other`` is cut as ``parameter`` is, and the whole and this rank's part have its strides."""
    own, given = parameter._spec, other._spec
    assert own.tensor_meta is not None and given.tensor_meta is not None
    is_alike = own.placements == given.placements and own.tensor_meta.stride == given.tensor_meta.stride
    return is_alike and parameter._local_tensor.stride() == other._local_tensor.stride()


def as_described(part: Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of what lies as ``parameter`` does, and may have another dtype."""
    spec = parameter._spec
    if part.dtype != parameter.dtype:
        spec = described(spec.mesh, spec.placements, tuple(parameter.shape), tuple(parameter.stride()), part.dtype)
    return around(part, spec)
