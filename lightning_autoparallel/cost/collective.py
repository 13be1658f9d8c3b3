"""What a collective costs: latency of its hops, and bytes over the narrowest link.

The form is that of NCCL's own model (NVIDIA/nccl src/graph/tuning.cc): a ring of n ranks on m nodes passes n-1 hops,
m-1 of them between nodes (twice that for an all-reduce); a ring that spans nodes enters each of them through all
adapters of its ranks there, so that its bandwidth is the smaller of one rank's link inside and of those adapters
together. Moved bytes are those of Thakur, Rabenseifner, Gropp 2005 ("Optimization of Collective Communication
Operations in MPICH", sec. 4), which are also those of nccl-tests' bus bandwidth (NVIDIA/nccl-tests
doc/PERFORMANCE.md). Reductions in switches (SHARP) are not counted on. What runs at once over one link shares it:
``traffic.py``.
"""

from __future__ import annotations

import math
from typing import Literal

from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.links import COLLECTIVES, LinkSpec
from lightning_autoparallel.errors import UnsupportedOpError

Link = Literal["inside", "between"]  # of a rank: to others on its node, and to other nodes
# Of a ring's bandwidth. NCCL's model gives trees at most 0.9 of it, less over nodes: they win by latency, when small.
_TREE_SHARE = 0.5


def collective_time_us(kind: str, size_bytes: int, group: GroupShape, hardware: HardwareSpec) -> float:
    """Microseconds of one collective; 0 for one rank or no bytes.

    Args:
        kind: one of ``COLLECTIVES``.
        size_bytes: bytes of the larger side on one rank: the gathered, or the not yet scattered, tensor.
        group: the ranks it runs on.
        hardware: the links.

    Raises:
        UnsupportedOpError: an unknown kind.
    """
    _check_known(kind)
    if group.ranks == 1 or size_bytes == 0:
        return 0.0
    ring_us = latency_us(kind, group, hardware) + moving_time_us(kind, size_bytes, group, hardware)
    if kind != "all_reduce" or kind in _link(group, hardware).kinds:  # what was measured is what the library chose
        return ring_us
    return min(ring_us, _tree_us(size_bytes, group, hardware))


def moving_time_us(kind: str, size_bytes: float, group: GroupShape, hardware: HardwareSpec) -> float:
    """Microseconds that the bytes of a collective take at the least, latency apart: in a ring.

    A tree saves a small all-reduce hops, but moves bytes more slowly: what is launched together with others, and pays
    for hops once, goes through the ring.

    Raises:
        UnsupportedOpError: an unknown kind.
    """
    _check_known(kind)
    return 0.0 if group.ranks == 1 else size_bytes / _bytes_per_us(kind, group, hardware)


def saturating_bytes(kind: str, group: GroupShape, hardware: HardwareSpec, fraction: float = 0.9) -> int:
    """The size from which a collective reaches ``fraction`` of its bandwidth: latency is the rest of its time.

    Raises:
        UnsupportedOpError: an unknown kind.
    """
    _check_known(kind)
    if group.ranks == 1:
        return 0
    moving_us = latency_us(kind, group, hardware) * fraction / (1 - fraction)
    return math.ceil(moving_us * _bytes_per_us(kind, group, hardware))


def _check_known(kind: str) -> None:
    if kind not in COLLECTIVES:
        raise UnsupportedOpError(f"collective {kind!r} has no cost: known are {', '.join(COLLECTIVES)}")


def latency_us(kind: str, group: GroupShape, hardware: HardwareSpec) -> float:
    """Microseconds of a collective of next to no bytes, in a ring."""
    inside, between = hops(kind, group)
    intra_us, inter_us = hardware.intra_node.of(kind).latency_us, hardware.inter_node.of(kind).latency_us
    return hardware.launch_latency_us + inside * intra_us + between * inter_us


def hops(kind: str, group: GroupShape) -> tuple[int, int]:
    """Hops on the longest way of a message: inside of nodes, and between them."""
    if kind in ("all_to_all", "permute"):  # every rank sends to the others itself
        return (1, 0) if group.nodes == 1 else (0, 1)
    ways = 2 if kind == "all_reduce" else 1
    return (group.ranks - group.nodes) * ways, (group.nodes - 1) * ways


def ring_gb_per_s(group: GroupShape, hardware: HardwareSpec, kind: str = "all_gather") -> float:
    """GB/s through each rank of a ring over the group, in collectives of this kind."""
    inside, between = hardware.intra_node.of(kind), hardware.inter_node.of(kind)
    if group.nodes == 1:
        return inside.bandwidth_gb_per_s
    adapters = group.ranks_per_node * between.bandwidth_gb_per_s
    if group.ranks_per_node == 1:
        return adapters
    return min(inside.bandwidth_gb_per_s, adapters)


def link_shares(kind: str, group: GroupShape, hardware: HardwareSpec) -> dict[Link, float]:
    """How much of the bandwidth of each link a collective takes while it moves bytes: at most all of it.

    A measured kind may be slower than the link: what slows it down is taken to be shared, too.
    """
    if group.ranks == 1:
        return {}
    if group.nodes == 1:
        return {"inside": 1.0}
    inside, adapters = hardware.intra_node.bandwidth_gb_per_s, hardware.inter_node.bandwidth_gb_per_s
    if group.ranks_per_node == 1 or kind in ("all_to_all", "permute"):  # most ranks are elsewhere
        return {"between": 1.0}
    adapters *= group.ranks_per_node
    ring = min(inside, adapters)
    return {"inside": ring / inside, "between": ring / adapters}


def moved_share(kind: str, ranks: int) -> float:
    """Bytes that pass each link of a ring, per byte of the larger side: nccl-tests' factor of the bus bandwidth."""
    others = (ranks - 1) / ranks
    return {"all_reduce": 2 * others, "broadcast": 1.0, "permute": 1.0}.get(kind, others)


def _link(group: GroupShape, hardware: HardwareSpec) -> LinkSpec:
    return hardware.intra_node if group.nodes == 1 else hardware.inter_node


def _bytes_per_us(kind: str, group: GroupShape, hardware: HardwareSpec) -> float:
    """Bytes of the larger side per microsecond, latency apart."""
    if kind == "all_to_all":
        return 1e3 / _exchange_ns_per_byte(group, hardware)
    if kind == "permute":
        return _link(group, hardware).of(kind).bandwidth_gb_per_s * 1e3
    return ring_gb_per_s(group, hardware, kind) * 1e3 / moved_share(kind, group.ranks)


def _exchange_ns_per_byte(group: GroupShape, hardware: HardwareSpec) -> float:
    """An all-to-all: what stays on the node and what leaves it move at once, each rank over its own links."""
    near = (group.ranks_per_node - 1) / group.ranks / hardware.intra_node.of("all_to_all").bandwidth_gb_per_s
    far = (group.ranks - group.ranks_per_node) / group.ranks / hardware.inter_node.of("all_to_all").bandwidth_gb_per_s
    return max(near, far)


def _tree_us(size_bytes: int, group: GroupShape, hardware: HardwareSpec) -> float:
    """An all-reduce up and down a tree: a chain inside of each node, a binary tree over nodes (tuning.cc)."""
    inside = (group.ranks // group.nodes - 1) * hardware.intra_node.latency_us
    between = math.ceil(math.log2(group.nodes)) * hardware.inter_node.latency_us
    moving_us = size_bytes / (_bytes_per_us("all_reduce", group, hardware) * _TREE_SHARE)
    return hardware.launch_latency_us + 2 * (inside + between) + moving_us
