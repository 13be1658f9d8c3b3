"""Redistributions as one program on torch's own local tensors, against the full tensor."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.mesh import ParallelMesh
from tests.local_tensors import run_on_local_tensors
from tests.redistributions import Pair, check_all, graph_of_all, pairs_over, parts_of_all, sources_of

NAMES = ("dp_replicate", "dp_shard", "tp")
SHAPE = (16, 24)


def axes_on(mesh: ParallelMesh, rank: int, names: tuple[str, ...]) -> list[PlanAxis]:
    """All axes and joint axes as ``rank`` sees them, on the groups of rank 0."""
    coordinates = torch.unravel_index(torch.tensor(rank), mesh.spec.sizes)
    found = []
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            axis = mesh.plan_axis(chosen)
            place = 0
            for name in chosen:
                place = place * mesh.sizes[name] + int(coordinates[names.index(name)])
            found.append(PlanAxis(mesh_axes=chosen, size=axis.size, rank=place, group_name=axis.group_name))
    return found


def check_on(mesh: ParallelMesh, pairs: list[Pair]) -> None:
    names, sizes = mesh.spec.names, mesh.spec.sizes
    full = torch.randn(SHAPE, dtype=torch.float64)
    graphs = []
    for rank in range(torch.Size(sizes).numel()):
        axes = axes_on(mesh, rank, names)
        graphs.append(graph_of_all(pairs, SHAPE, axes[: len(names)], axes[len(names) :]))
    inputs = list(zip(*(parts_of_all(full, source, sizes) for source in sources_of(pairs)), strict=True))
    check_all(pairs, run_on_local_tensors(graphs, inputs), full, sizes)


def test_all_pairs_on_two_axes(fake_mesh):
    check_on(fake_mesh(dp_shard=2, tp=2), pairs_over(2))


def test_pairs_on_three_axes(fake_mesh):
    check_on(fake_mesh(**dict.fromkeys(NAMES, 2)), random.Random(0).sample(pairs_over(3), 40))


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(25))
def test_all_pairs_on_three_axes(part: int, fake_mesh):
    check_on(fake_mesh(**dict.fromkeys(NAMES, 2)), pairs_over(3)[part::25])
