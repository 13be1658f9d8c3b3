"""MeshSpec -> DeviceMesh, with every ascending subset of its axes flattened into one communicator."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.torch_compat.collectives import (
    can_order_ranks,
    concatenated_mesh,
    give_default_timeout,
    group_of,
    has_group,
    new_ordered_groups,
)
from lightning_autoparallel.torch_compat.default_world import backend_of
from lightning_autoparallel.torch_compat.gloo import one_gloo_thread, own_gloo_groups
from lightning_autoparallel.torch_compat.mesh_caches import forget_meshes


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """A device mesh and its flattened sub-meshes, keyed by the mesh axes they join.

    ``ordered`` are groups whose ranks count in another order of axes, which a plan or a pass has asked for. They have
    names; they are made where a step is to run that uses them.
    """

    spec: MeshSpec
    device_mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]
    ordered: dict[tuple[str, ...], PlanAxis] = field(default_factory=dict)

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
        mesh = next(iter(self.submeshes.values()))
        return str(backend_of(mesh.device_type, mesh.get_group()))

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

    def ordered_axis(self, axes: Sequence[PlanAxis]) -> PlanAxis | None:
        """``axes`` as one whose ranks count in this order, the first slowest; a group of its own unless it ascends.

        Nothing is made: collectives on it may run once ``make_groups`` was told its name. None where torch cannot
        order the ranks of a group.
        """
        names = tuple(name for axis in axes for name in self.active(axis.mesh_axes))
        if names in self.submeshes:
            return self.plan_axis(names)
        if not can_order_ranks():
            return None
        if names not in self.ordered:
            (own,) = (ranks for ranks in self._ranks_in_order(names) if dist.get_rank() in ranks)
            self.ordered[names] = PlanAxis(
                mesh_axes=names, size=len(own), rank=own.index(dist.get_rank()), group_name=self._name_of(names)
            )
        return self.ordered[names]

    def make_groups(self, names: Collection[str]) -> None:
        """Make the groups of these names that are not there yet; every rank calls it with the same ones.

        Names of other groups than those that were asked for are let pass.
        """
        for axis in sorted(self.ordered.values(), key=lambda axis: axis.group_name):
            if axis.group_name in names and not has_group(axis.group_name):
                with one_gloo_thread():
                    new_ordered_groups(self._ranks_in_order(axis.mesh_axes), axis.group_name)

    def make_batch_group(self) -> dist.ProcessGroup:
        """One rank of each batch shard, this one among them: a group that no plan uses, made once.

        Every rank calls it alike.
        """
        name = self._name_of(("a batch",))
        if not has_group(name):
            with one_gloo_thread():
                new_ordered_groups(self._ranks_in_order(self.data_parallel_axes), name)
        return group_of(name)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that there are."""
        return tuple(name for name in self.axes_by_group() if has_group(name))

    def _name_of(self, names: tuple[str, ...]) -> str:
        """Alike on all ranks, and for all meshes of these ranks."""
        ranks = hashlib.blake2b(str(self.device_mesh.mesh.tolist()).encode(), digest_size=6).hexdigest()
        return f"{','.join(names)} of {','.join(self.spec.names)} {ranks}"

    def _ranks_in_order(self, names: tuple[str, ...]) -> list[list[int]]:
        """The ranks of every group over ``names``, counted along the last of them first."""
        own = [self.spec.names.index(name) for name in names]
        others = [i for i in range(len(self.spec.names)) if i not in own]
        ranks = self.device_mesh.mesh.permute(*others, *own)
        size = math.prod(self.sizes[name] for name in names)
        return [[int(rank) for rank in group] for group in ranks.reshape(-1, size).tolist()]

    def mesh_of(self, axes: Sequence[PlanAxis]) -> DeviceMesh:
        """A mesh with one dim per plan axis, on the groups that there are; of a single process for none."""
        if not axes:
            return self.submesh(self.spec.names)
        meshes = [self.submesh(axis.mesh_axes) for axis in axes]
        return meshes[0] if len(meshes) == 1 else concatenated_mesh(meshes)

    def axes_by_group(self) -> dict[str, str]:
        """Process group name -> mesh axes joined by a comma, as reports spell them; in the order its ranks count."""
        named = {mesh.get_group().group_name: ",".join(axes) for axes, mesh in self.submeshes.items()}
        return named | {axis.group_name: axis.name for axis in self.ordered.values()}


def build_mesh(spec: MeshSpec, device_type: str) -> ParallelMesh:
    """Create the mesh on the initialised default process group, on all ranks in the same order.

    Its groups have the default group's timeout.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    spec = spec.resolve(dist.get_world_size())
    forget_meshes()  # those of an earlier training
    backend = own_gloo_groups(device_type)
    backends: Any = None if backend is None else dict.fromkeys(spec.names, backend)
    active = tuple(name for name, size in spec.axes if size > 1)
    with one_gloo_thread():
        device_mesh = init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names, backend_override=backends)
        submeshes: dict[tuple[str, ...], DeviceMesh] = {(name,): device_mesh[name] for name in spec.names}
        for count in range(2, len(active) + 1):
            for axes in itertools.combinations(active, count):
                submeshes[axes] = device_mesh[axes]._flatten("_".join(axes), backend_override=backend)
    give_default_timeout(mesh.get_group() for mesh in submeshes.values())
    return ParallelMesh(spec=spec, device_mesh=device_mesh, submeshes=submeshes)
