"""Values on a mesh of several axes that are gathered one axis at a time, as lowering writes it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.redistribute import redistribute
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import explicit, local_shape
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.placements import R
from tests.support.redistributions import axes_of, groups_of, joint_axis, parts_of_all


class Chains:
    """A mesh of ``sizes``; group ``"1"`` is axis 1's, ``"1,0"`` joins axes 1 and 0, axis 1 outside."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.world = math.prod(sizes)
        self.groups = groups_of(*sizes)

    def axes(self) -> list[PlanAxis]:
        """The axes as rank 0 sees them."""
        return axes_of(0, *self.sizes)

    def join(self, names: Sequence[str]) -> PlanAxis | None:
        """The group of several axes in any order."""
        return joint_axis(0, self.sizes, [int(name) for name in names]) if ",".join(names) in self.groups else None

    def ascending(self, names: Sequence[str]) -> PlanAxis | None:
        """The group of several axes as a flattened mesh has it."""
        return self.join(names) if list(names) == sorted(names) else None

    def shards(self, full: Tensor, source: Placements) -> list[list[Tensor]]:
        """Each rank's input: ``full`` cut by one axis after the other."""
        return [[part.contiguous()] for part in parts_of_all(full, source, self.sizes)]

    def graph(self, shape: torch.Size, source: Placements, order: Sequence[int]) -> fx.Graph:
        """Every rank's graph, as gathers know no rank: its shard gathered over the axes in ``order``."""
        return gathering(self.axes(), shape, source, order)


def gathering(axes: Sequence[PlanAxis], shape: torch.Size, source: Placements, order: Sequence[int]) -> fx.Graph:
    """A graph that gathers a shard of a tensor over ``axes`` in ``order``, a redistribution each."""
    with FakeTensorMode() as mode:
        local = torch.empty(local_shape(shape, source, axes))
    emitter = GraphEmitter(mode)
    node, current = emitter.placeholder("x", local), explicit(source, axes)
    for k in order:
        target = tuple(R if i == k else placement for i, placement in enumerate(current))
        node, current = redistribute(emitter, node, shape, current, target, axes), target
    emitter.graph.output([node])
    return emitter.graph
