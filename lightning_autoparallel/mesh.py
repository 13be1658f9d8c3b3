"""MeshSpec -> DeviceMesh, with every ascending subset of its axes flattened into one communicator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.torch_compat.collectives import concatenated_mesh


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """A device mesh and its flattened sub-meshes, keyed by the mesh axes they join."""

    spec: MeshSpec
    device_mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]

    @property
    def sizes(self) -> dict[str, int]:
        """Processes per axis, outermost first."""
        return dict(self.spec.axes)

    def active(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of ``axes`` that have more than one process: the others never communicate."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    @property
    def data_parallel_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch, size 1 included."""
        return tuple(name for name in self.spec.names if name.startswith("dp_"))

    @property
    def data_parallel_size(self) -> int:
        """Number of distinct batch shards."""
        axis = self.plan_axis(self.data_parallel_axes)
        return axis.size if axis else 1

    @property
    def data_parallel_rank(self) -> int:
        """Which batch shard this process holds."""
        axis = self.plan_axis(self.data_parallel_axes)
        return axis.rank if axis else 0

    @property
    def backend(self) -> str:
        """What its process groups talk through: ``gloo``, ``nccl``, or ``fake``."""
        return str(dist.get_backend(next(iter(self.submeshes.values())).get_group()))

    def submesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The one-dimensional mesh over ``axes`` together; axes of size 1 are dropped first."""
        wanted = self.active(axes) or axes[-1:]
        return self.submeshes[wanted]

    def plan_axis(self, axes: tuple[str, ...]) -> PlanAxis | None:
        """``axes`` as one plan axis, or None if they hold a single process."""
        wanted = self.active(axes)
        if not wanted:
            return None
        mesh = self.submeshes[wanted]
        return PlanAxis(
            mesh_axes=wanted, size=mesh.size(), rank=mesh.get_local_rank(), group_name=mesh.get_group().group_name
        )

    def mesh_of(self, axes: Sequence[PlanAxis]) -> DeviceMesh:
        """A mesh with one dim per plan axis, on the groups that there are; of a single process for none."""
        if not axes:
            return self.submesh(self.spec.names)
        meshes = [self.submesh(axis.mesh_axes) for axis in axes]
        return meshes[0] if len(meshes) == 1 else concatenated_mesh(meshes)

    def axes_by_group(self) -> dict[str, str]:
        """Process group name -> mesh axes joined by a comma, as reports spell them."""
        return {mesh.get_group().group_name: ",".join(axes) for axes, mesh in self.submeshes.items()}


def build_mesh(spec: MeshSpec, device_type: str) -> ParallelMesh:
    """Create the mesh on the initialised default process group, on all ranks in the same order.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    spec = spec.resolve(dist.get_world_size())
    device_mesh = init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)
    submeshes: dict[tuple[str, ...], DeviceMesh] = {(name,): device_mesh[name] for name in spec.names}
    active = tuple(name for name, size in spec.axes if size > 1)
    for count in range(2, len(active) + 1):
        for axes in itertools.combinations(active, count):
            submeshes[axes] = device_mesh[axes]._flatten("_".join(axes))
    return ParallelMesh(spec=spec, device_mesh=device_mesh, submeshes=submeshes)
