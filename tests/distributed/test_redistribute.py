"""Redistributions over real gloo groups, against the full tensor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.plan.planner import joint_axes
from tests.support.placements import AVG, P, R, S
from tests.support.redistributions import (
    INNER_FIRST,
    Pair,
    check_all,
    graph_of_all,
    pairs_over,
    parts_of_all,
    sources_of,
)
from tests.support.uneven import nested_joined_from_all, nested_parts_of_all
from tests.support.worlds import Worlds

NAMES = ("dp_replicate", "dp_shard", "tp")
SHAPE = (16, 24)
INTERLEAVED = [
    (INNER_FIRST, (R, R)),
    ((P, P), INNER_FIRST),
    ((AVG, P), INNER_FIRST),
    ((S(0), S(0)), INNER_FIRST),
    (INNER_FIRST, (S(1), S(0))),
]


UNEVEN = (5, 7)
UNEVEN_PAIRS = [
    ((S(0), S(0)), (R, R)),
    ((S(0), S(0)), (S(0), R)),
    ((S(0), S(0)), (S(1), S(1))),
    ((S(0), P), (S(0), S(0))),
    ((P, AVG), (S(0), S(0))),
    ((AVG, P), (S(1), S(1))),
    (INNER_FIRST, (R, S(0))),
    ((S(0), S(0)), INNER_FIRST),
]


def full_tensor(shape: tuple[int, int] = SHAPE) -> Tensor:
    """The same on all ranks and in the test."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def redistributed(pairs: list[Pair], shape: tuple[int, int] = SHAPE) -> tuple[list[Tensor], list[tuple[str, ...]]]:
    """What this rank has of every pair, and the orders of axes that groups were made for."""
    count = dist.get_world_size().bit_length() - 1
    mesh = build_mesh(MeshSpec.from_mapping(dict.fromkeys(NAMES[-count:], 2)), "cpu")
    axes = tuple(mesh.plan_axis((name,)) for name in mesh.spec.names)
    graph = graph_of_all(pairs, shape, axes, joint_axes(axes, mesh), mesh.ordered_axis)
    mesh.make_groups({axis.group_name for axis in mesh.ordered.values()})
    full, parts_of = full_tensor(shape), parts_of_all if shape == SHAPE else nested_parts_of_all
    inputs = [parts_of(full, source, mesh.spec.sizes)[dist.get_rank()] for source in sources_of(pairs)]
    return list(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs)), list(mesh.ordered)


def test_all_pairs_on_two_axes(worlds: Worlds):
    pairs = pairs_over(2) + INTERLEAVED
    outputs, orders = zip(*worlds(4).run(redistributed, pairs), strict=True)
    check_all(pairs, outputs, full_tensor(), (2, 2))
    assert list(orders) == [[("tp", "dp_shard")]] * 4


def test_uneven_pairs_on_two_axes(worlds: Worlds):
    outputs, _ = zip(*worlds(4).run(redistributed, UNEVEN_PAIRS, UNEVEN), strict=True)
    check_all(UNEVEN_PAIRS, outputs, full_tensor(UNEVEN), (2, 2), nested_joined_from_all)


@pytest.mark.matrix
def test_uneven_pairs_on_three_axes(worlds: Worlds):
    pairs = random.Random(0).sample(pairs_over(3), 100)
    outputs, _ = zip(*worlds(8).run(redistributed, pairs, UNEVEN), strict=True)
    check_all(pairs, outputs, full_tensor(UNEVEN), (2, 2, 2), nested_joined_from_all)


@pytest.mark.matrix
def test_pairs_on_three_axes(worlds: Worlds):
    pairs = random.Random(0).sample(pairs_over(3), 200)
    outputs, _ = zip(*worlds(8).run(redistributed, pairs), strict=True)
    check_all(pairs, outputs, full_tensor(), (2, 2, 2))
