"""What ranks placements: rough costs of an operator on a share of its tensors, and of moving a value over one axis.

Only their ratios count, and a plan must not change with the device it is predicted for: the rates are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.cost.flops import operator_flops
from lightning_autoparallel.fx.nodes import VIEWS
from lightning_autoparallel.fx.placements import dim_of


@dataclass(frozen=True, kw_only=True)
class PlacementRates:
    """Rates that placements are ranked with; no prediction of seconds is made from them."""

    name: str
    matmul_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    link_latency_us: float
    kernel_latency_us: float


# Orders of magnitude of an accelerator with a fast link, chosen so that their *ratios* are typical: moving a byte
# between ranks costs some ten times reading it, and a launch costs as much as moving about a megabyte.
GENERIC = PlacementRates(
    name="generic",
    matmul_tflops=300.0,
    memory_gb_per_s=2000.0,
    link_gb_per_s=100.0,
    link_latency_us=10.0,
    kernel_latency_us=2.0,
)


def operator_time_us(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    local_bytes: int,
    share: float,
    rates: PlacementRates,
) -> float:
    """Microseconds to run ``op``: the larger of its FLOPs and its memory traffic.

    ``args`` and ``result`` are global fake tensors, ``share`` the part of the FLOPs that this rank does,
    ``local_bytes`` what it reads and writes.
    """
    if op in VIEWS:
        return 0.0
    flops = operator_flops(op, args, kwargs, result)
    return max(flops * share / (rates.matmul_tflops * 1e6), local_bytes / (rates.memory_gb_per_s * 1e3))


def local_size_bytes(tensors: Sequence[Tensor | None], shards: Sequence[int]) -> int:
    """Bytes of one rank's part of ``tensors``, each cut into the given number of shards."""
    return sum(
        tensor.numel() * tensor.element_size() // shard
        for tensor, shard in zip(tensors, shards, strict=True)
        if tensor is not None
    )


def redistribution_time_us(
    source: Placement, target: Placement, size_bytes: int, axis_size: int, rates: PlacementRates
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
        return rates.kernel_latency_us + 2 * size_bytes / axis_size / (rates.memory_gb_per_s * 1e3)
    if kind == "impossible":
        return math.inf
    share = (axis_size - 1) / axis_size
    moved = {
        "all_gather": share,
        "reduce_scatter": share,
        "all_reduce": 2 * share,
        "all_to_all": share / axis_size,
    }[kind]
    return rates.link_latency_us + moved * size_bytes / (rates.link_gb_per_s * 1e3)


def redistribution_kind(source: Placement, target: Placement) -> str | None:
    """What turns ``source`` into ``target``: a collective's name, ``slice`` (all local), None, ``impossible``.

    A shard that becomes another interleaving of the same dim is gathered, and a rank's part taken of the whole.
    """
    if source == target:
        return None
    if isinstance(target, Partial):
        return "impossible"
    if isinstance(source, Replicate):
        return "slice"
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"
    is_whole = isinstance(target, Replicate) or dim_of(source) == dim_of(target)
    return "all_gather" if is_whole else "all_to_all"
