"""What it costs to move a value from one placement to another, over one mesh axis."""

from __future__ import annotations

import math

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.cost.hardware import HardwareSpec


def redistribution_time_us(
    source: Placement, target: Placement, size_bytes: int, axis_size: int, hardware: HardwareSpec
) -> float:
    """Microseconds to redistribute a tensor of ``size_bytes`` (its global size) over ``axis_size`` ranks.

    Ring algorithms: an all-gather or reduce-scatter moves (n-1)/n of the tensor through every link, an all-reduce twice
    that, an all-to-all 1/n of it (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication
    Operations in MPICH", sec. 4). Infinite where no collective does it.
    """
    kind = redistribution_kind(source, target)
    if kind is None:
        return 0.0
    if kind == "slice":
        return hardware.kernel_latency_us + 2 * size_bytes / axis_size / (hardware.memory_gb_per_s * 1e3)
    if kind == "impossible":
        return math.inf
    share = (axis_size - 1) / axis_size
    moved = {
        "all_gather": share,
        "reduce_scatter": share,
        "all_reduce": 2 * share,
        "all_to_all": share / axis_size,
    }[kind]
    return hardware.link_latency_us + moved * size_bytes / (hardware.link_gb_per_s * 1e3)


def redistribution_kind(source: Placement, target: Placement) -> str | None:
    """What turns ``source`` into ``target``: a collective's name, ``slice`` (all local), None, ``impossible``."""
    if source == target:
        return None
    if isinstance(target, Partial):
        return "impossible"
    if isinstance(source, Replicate):
        return "slice"
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"
    return "all_gather" if isinstance(target, Replicate) else "all_to_all"
