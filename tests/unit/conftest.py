"""Worlds that exist in this one process only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.torch_compat.collectives import init_fake_world


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., ParallelMesh]]:
    """``fake_mesh(dp_shard=2, tp=2, rank=3)``: a mesh as one rank of a fake world sees it; one per test."""

    def make(rank: int = 0, **axes: int) -> ParallelMesh:
        spec = MeshSpec.from_mapping(axes)
        size = 1
        for axis in spec.sizes:
            size *= axis
        init_fake_world(size, rank)
        return build_mesh(spec, "cpu")

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
