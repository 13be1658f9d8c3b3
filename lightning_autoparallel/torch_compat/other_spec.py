"""A DTensor that takes another's place in memory and on the mesh, and stays the object that it is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

_OWN = 2  # the local tensor, and the storage object that is asked


def take_shards(tensor: DTensor, other: DTensor) -> None:
    """Let ``tensor`` hold what ``other`` holds, in its placements.

    Whoever has the object (an optimizer's groups, a user's attribute, hooks) sees the change. torch's own way, to swap
    two tensors, is refused where a graph of gradients knows one of them.
    """
    assert tensor.shape == other.shape and tensor.dtype == other.dtype
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def is_held_elsewhere(tensor: DTensor) -> bool:
    """Whether something besides ``tensor`` has its memory, as a ``tensor.data`` that was taken."""
    storage = tensor._local_tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > _OWN
