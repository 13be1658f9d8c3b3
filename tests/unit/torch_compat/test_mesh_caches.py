"""A second mesh of the same ranks, in a process in which one rank has computed on the first."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from tests.support.worlds import Worlds


def shards(mesh: ParallelMesh) -> DTensor:
    """Of four rows of ones."""
    return DTensor.from_local(torch.ones(2, 3), mesh.device_mesh, [Shard(0)], run_check=False)


def on_two_meshes() -> tuple[float, bool]:
    """What all ranks add up on a second mesh, and whether it was there."""
    spec = MeshSpec.from_mapping({"dp_shard": 2})
    first = build_mesh(spec, "cpu")
    if first.data_parallel_rank == 0:
        (shards(first) * 2).sum(1)  # nothing is sent
    second = build_mesh(spec, "cpu")
    twice = shards(second) * 2
    return twice.sum().full_tensor().item(), twice.sum(1).device_mesh is second.device_mesh


def test_ranks_meet_on_the_mesh_of_now(worlds: Worlds) -> None:
    assert worlds(2).run(on_two_meshes, timeout_s=30) == [(24.0, True)] * 2
