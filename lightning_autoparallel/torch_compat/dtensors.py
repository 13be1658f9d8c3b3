"""DTensors around what a rank holds already, by a description that is made once.

``DTensor.from_local`` describes the tensor anew each time, which is most of what it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
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
    """A DTensor that shares the memory of this rank's part, which no graph of gradients leads to."""
    assert not local.requires_grad and description.tensor_meta is not None
    assert local.dtype == description.tensor_meta.dtype
    return DTensor(local.view_as(local), description, requires_grad=False)
