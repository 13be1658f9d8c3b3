"""Redistributions as one program on torch's own local tensors, against the full tensor."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.mesh import ParallelMesh
from tests.support.local_tensors import run_on_local_tensors
from tests.support.redistributions import Pair, check_all, graph_of_all, pairs_over, parts_of_all, sources_of
from tests.support.uneven import nested_joined_from_all, nested_parts_of_all

NAMES = ("dp_replicate", "dp_shard", "tp")
SHAPE = (16, 24)
UNEVEN = (5, 7)


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


def outputs_on(
    mesh: ParallelMesh, pairs: list[Pair], shape: tuple[int, int], inputs: list[list[Tensor]]
) -> list[list[Tensor]]:
    names = mesh.spec.names
    graphs = []
    for rank in range(torch.Size(mesh.spec.sizes).numel()):
        axes = axes_on(mesh, rank, names)
        graphs.append(graph_of_all(pairs, shape, axes[: len(names)], axes[len(names) :]))
    return run_on_local_tensors(graphs, list(zip(*inputs, strict=True)))


def check_on(mesh: ParallelMesh, pairs: list[Pair]) -> None:
    full = torch.randn(SHAPE, dtype=torch.float64)
    inputs = [parts_of_all(full, source, mesh.spec.sizes) for source in sources_of(pairs)]
    check_all(pairs, outputs_on(mesh, pairs, SHAPE, inputs), full, mesh.spec.sizes)


def check_uneven_on(mesh: ParallelMesh, pairs: list[Pair], shape: tuple[int, int] = UNEVEN) -> None:
    full = torch.randn(shape, dtype=torch.float64)
    inputs = [nested_parts_of_all(full, source, mesh.spec.sizes) for source in sources_of(pairs)]
    check_all(pairs, outputs_on(mesh, pairs, shape, inputs), full, mesh.spec.sizes, nested_joined_from_all)


def test_all_pairs_on_two_axes(fake_mesh):
    check_on(fake_mesh(dp_shard=2, tp=2), pairs_over(2))


def test_pairs_on_three_axes(fake_mesh):
    check_on(fake_mesh(**dict.fromkeys(NAMES, 2)), random.Random(0).sample(pairs_over(3), 40))


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(25))
def test_all_pairs_on_three_axes(part: int, fake_mesh):
    check_on(fake_mesh(**dict.fromkeys(NAMES, 2)), pairs_over(3)[part::25])


def test_all_pairs_of_uneven_shards_on_two_axes(fake_mesh):
    check_uneven_on(fake_mesh(dp_shard=2, tp=2), pairs_over(2))


def test_pairs_of_uneven_shards_on_three_axes(fake_mesh):
    check_uneven_on(fake_mesh(**dict.fromkeys(NAMES, 2)), random.Random(1).sample(pairs_over(3), 30))


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(3, 1), (6, 10), (1, 8)], ids=str)
def test_all_pairs_of_other_uneven_shapes_on_two_axes(shape: tuple[int, int], fake_mesh):
    check_uneven_on(fake_mesh(dp_shard=2, tp=2), pairs_over(2), shape)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(5, 7), (3, 12), (9, 1)], ids=str)
def test_many_pairs_of_uneven_shards_on_three_axes(shape: tuple[int, int], fake_mesh):
    check_uneven_on(fake_mesh(**dict.fromkeys(NAMES, 2)), random.Random(2).sample(pairs_over(3), 600), shape)
