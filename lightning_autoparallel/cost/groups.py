"""How the ranks of a process group are spread over nodes: what its links are."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_autoparallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """``ranks`` of one process group on ``nodes`` nodes.

    ``ranks_per_node`` are those on the node that has fewest, whose adapters are the narrowest place; unless given, the
    ranks are spread evenly.
    """

    ranks: int
    nodes: int = 1
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.nodes <= self.ranks, f"{self.ranks} ranks cannot be on {self.nodes} nodes"
        if not self.ranks_per_node:
            object.__setattr__(self, "ranks_per_node", self.ranks // self.nodes)
        assert 1 <= self.ranks_per_node <= self.ranks // self.nodes, f"{self.ranks_per_node} are not the fewest ranks"


def group_shape(sizes: Mapping[str, int], axes: Sequence[str], ranks_per_node: int) -> GroupShape:
    """The shape of the groups along ``axes`` of a mesh with these ``sizes``, outermost first (ranks are row-major).

    Where the groups differ, because an axis does not divide the nodes, it is that of the one on most nodes, and of
    those with fewest ranks on a node.
    """
    strides = _strides(sizes)
    within = _offsets([(sizes[axis], strides[axis]) for axis in sizes if axis in axes])
    starts = _offsets([(sizes[axis], strides[axis]) for axis in sizes if axis not in axes])
    spread = [Counter((start + offset) // ranks_per_node for offset in within).values() for start in starts]
    nodes = max(map(len, spread))
    fewest = min(min(ranks) for ranks in spread if len(ranks) == nodes)
    return GroupShape(ranks=len(within), nodes=nodes, ranks_per_node=fewest)


def group_shapes(
    sizes: Mapping[str, int], axes: Iterable[tuple[str, ...]], ranks_per_node: int
) -> dict[tuple[str, ...], GroupShape]:
    """The shape of the groups along each of these sets of mesh axes."""
    return {names: group_shape(sizes, names, ranks_per_node) for names in axes}


class MeshGroups(Mapping[str, GroupShape]):
    """Process group name -> shape, for all groups of a mesh; those that passes ask for later are found too."""

    def __init__(self, mesh: ParallelMesh, ranks_per_node: int) -> None:
        self._mesh, self._ranks_per_node = mesh, ranks_per_node
        self._shapes: dict[str, GroupShape] = {}

    def __getitem__(self, name: str) -> GroupShape:
        if name not in self._shapes:
            axes = self._mesh.axes_by_group()[name].split(",")
            self._shapes[name] = group_shape(self._mesh.sizes, axes, self._ranks_per_node)
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mesh.axes_by_group())

    def __len__(self) -> int:
        return len(self._mesh.axes_by_group())


def mesh_groups(mesh: ParallelMesh, ranks_per_node: int) -> MeshGroups:
    """The shapes of a mesh's process groups, by name."""
    return MeshGroups(mesh, ranks_per_node)


def _strides(sizes: Mapping[str, int]) -> dict[str, int]:
    inner = list(sizes.values())
    return {axis: math.prod(inner[position + 1 :]) for position, axis in enumerate(sizes)}


def _offsets(dims: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks, from the first, of all positions along dims of these (size, stride)."""
    return [sum(steps) for steps in itertools.product(*(range(0, size * stride, stride) for size, stride in dims))]
