"""How the ranks of a process group are spread over nodes: what its links are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_autoparallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """``ranks`` of one process group on ``nodes`` nodes."""

    ranks: int
    nodes: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.nodes <= self.ranks, f"{self.ranks} ranks cannot be on {self.nodes} nodes"

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the node that has fewest: its adapters are the narrowest place."""
        return self.ranks // self.nodes


def group_shape(sizes: Mapping[str, int], axes: Sequence[str], ranks_per_node: int) -> GroupShape:
    """The shape of the groups along ``axes`` of a mesh with these ``sizes``, outermost first (ranks are row-major).

    Where the groups differ, because an axis does not divide the nodes, it is that of the one on most nodes.
    """
    strides = _strides(sizes)
    within = _offsets([(sizes[axis], strides[axis]) for axis in sizes if axis in axes])
    starts = _offsets([(sizes[axis], strides[axis]) for axis in sizes if axis not in axes])
    nodes = max(len({(start + offset) // ranks_per_node for offset in within}) for start in starts)
    return GroupShape(ranks=len(within), nodes=nodes)


def group_shapes(
    sizes: Mapping[str, int], axes: Iterable[tuple[str, ...]], ranks_per_node: int
) -> dict[tuple[str, ...], GroupShape]:
    """The shape of the groups along each of these sets of mesh axes."""
    return {names: group_shape(sizes, names, ranks_per_node) for names in axes}


def mesh_groups(mesh: ParallelMesh, ranks_per_node: int) -> dict[str, GroupShape]:
    """Process group name -> shape, for all groups of the mesh."""
    return {
        name: group_shape(mesh.sizes, axes.split(","), ranks_per_node) for name, axes in mesh.axes_by_group().items()
    }


def _strides(sizes: Mapping[str, int]) -> dict[str, int]:
    inner = list(sizes.values())
    return {axis: math.prod(inner[position + 1 :]) for position, axis in enumerate(sizes)}


def _offsets(dims: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks, from the first, of all positions along dims of these (size, stride)."""
    return [sum(steps) for steps in itertools.product(*(range(0, size * stride, stride) for size, stride in dims))]
