"""What torch keeps of meshes by their value: two of the same ranks are equal to it, though their groups are not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, _redistribute


def forget_meshes() -> None:
    """Let go of what was worked out for calls with DTensors, on all ranks at one time.

    Results of a call that a rank has made before come on the mesh of then. Where other ranks have not made it, theirs
    come on a new mesh of the same ranks, and each would wait for the others in a group of its own.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    kept: Any = propagator.propagate_op_sharding  # of each thread; autograd's outlive trainings
    propagator.propagate_op_sharding = type(kept)(kept.cache.__wrapped__)
    torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
