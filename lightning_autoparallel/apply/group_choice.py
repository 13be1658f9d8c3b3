"""Which process group one collective over several axes runs on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import cut_order, dim_of, touch

Warn = Callable[[str], None]
# Axes in the order in which their ranks count, the first one slowest -> that group; None where there can be none.
OrderedAxis = Callable[[Sequence[PlanAxis]], PlanAxis | None]


class WarnOnce:
    """Hands on the first message about each mesh shape."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._told: set[tuple[int, ...]] = set()

    def __call__(self, axes: Sequence[PlanAxis]) -> None:
        shape = tuple(axis.size for axis in axes)
        if shape in self._told:
            return
        self._told.add(shape)
        names = " x ".join(f"{axis.name}: {axis.size}" for axis in axes)
        self._warn(
            f"the mesh ({names}) has no process group that joins several of its axes: values that move over several "
            "axes take one collective per axis where one would do; flatten the axes of the mesh into one, or let this "
            "package build the mesh"
        )


class Groups:
    """The groups that join several of ``axes``: ``joint_axes``, and what is asked of ``ordered``."""

    def __init__(
        self,
        axes: Sequence[PlanAxis],
        joint_axes: Sequence[PlanAxis] = (),
        ordered: OrderedAxis | None = None,
        missing: WarnOnce | None = None,
    ) -> None:
        self.axes = axes
        self._joint = {axis.mesh_axes: axis for axis in joint_axes}
        self._ordered = ordered
        self._missing = missing

    def join(self, positions: Sequence[int], exact: bool = False) -> tuple[tuple[int, ...], PlanAxis] | None:
        """A group over the axes at ``positions`` and the order in which its ranks count; None if there is none.

        With ``exact`` the given order is worth a group of its own: every other costs a copy of the tensor.
        """
        order = tuple(positions)
        if len(order) == 1:
            return order, self.axes[order[0]]
        found = self._known(order) or (self._made(order) if exact else None)
        if found is not None:
            return order, found
        for other in itertools.permutations(sorted(order)):
            known = self._known(other)
            if known is not None:
                return other, known
        made = self._made(order)
        if made is None and self._missing is not None:
            self._missing(self.axes)
        return None if made is None else (order, made)

    def _known(self, order: tuple[int, ...]) -> PlanAxis | None:
        axis = self._joint.get(tuple(name for i in order for name in self.axes[i].mesh_axes))
        assert axis is None or axis.size == math.prod(self.axes[i].size for i in order), f"{axis} is not of this mesh"
        return axis

    def _made(self, order: tuple[int, ...]) -> PlanAxis | None:
        axis = self._ordered([self.axes[i] for i in order]) if self._ordered is not None else None
        if axis is not None:
            self._joint[axis.mesh_axes] = axis
        return axis


def rank_order(
    positions: Sequence[int], cuts: Placements, axes: Sequence[PlanAxis], shape: Sequence[int]
) -> tuple[list[int], bool]:
    """The order of ranks in which the parts of a tensor are, and whether that saves a copy that other orders need.

    It does where the axes cut the same dim, each one all pieces of the one before, and nothing but single elements
    comes before that dim: then the parts lie in memory in this order.
    """
    ascending = sorted(positions)
    dims = {dim_of(cuts[i]) for i in positions} if cuts else set()
    if len(dims) != 1:
        return ascending, False
    (dim,) = dims
    order = [i for i in cut_order(cuts, dim) if i in positions]
    return order, touch(order, cuts, axes) and all(size == 1 for size in shape[:dim])
