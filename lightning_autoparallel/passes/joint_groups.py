"""Process groups by name: those that join others, on which collectives are fused, and the mesh axes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.mesh import ParallelMesh

# Names of process groups, the outermost first -> the group of all their ranks, row by row; None if there is none.
JoinGroups = Callable[[Sequence[str]], PlanAxis | None]


def joint_groups(mesh: ParallelMesh) -> JoinGroups | None:
    """Find, or ask for, groups that join several of ``mesh``; None on a mesh of one axis."""
    if len(mesh.active(mesh.spec.names)) < 2:
        return None

    def join(names: Sequence[str]) -> PlanAxis | None:
        known = {axis.group_name: axis for axis in _axes_of(mesh)}
        axes = [known[name] for name in names if name in known]
        joined = [mesh_axis for axis in axes for mesh_axis in axis.mesh_axes]
        if len(axes) < len(names) or len(set(joined)) < len(joined):
            return None
        return mesh.ordered_axis(axes)

    return join


def _axes_of(mesh: ParallelMesh) -> list[PlanAxis]:
    flattened = [mesh.plan_axis(names) for names in mesh.submeshes if mesh.active(names)]
    return [axis for axis in flattened if axis is not None] + list(mesh.ordered.values())


class AxesByGroup(Mapping[str, str]):
    """Process group name -> mesh axes as reports spell them, groups that passes ask for included."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def __getitem__(self, name: str) -> str:
        return self._mesh.axes_by_group()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mesh.axes_by_group())

    def __len__(self) -> int:
        return len(self._mesh.axes_by_group())
