"""What gathering a parameter and reducing its gradient are priced as is what is launched for it, on three axes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Placement, Shard

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.parameter_alternatives import Lying, free_parameters
from lightning_autoparallel.plan.planner import plan_axes
from tests.support.placements import P, R, S
from tests.support.redistributions import axes_of, graph_of_all, joint_axes_of
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import THREE, costs_of

SHAPE = (16, 24)
NAMES = tuple(THREE)


def launches_us(
    source: Sequence[Placement], target: Sequence[Placement], mesh: ParallelMesh, costs: CostModel
) -> float:
    """Of the collectives that a float32 of this shape is moved by, each over all of its group."""
    sizes = tuple(THREE.values())
    pair = tuple(source), tuple(target)
    graph = graph_of_all([pair], SHAPE, axes_of(0, *sizes), joint_axes_of(0, *sizes), dtype=torch.float32)
    total = 0.0
    for node in fxn.collectives_of(graph):
        axis = mesh.plan_axis(tuple(NAMES[int(place)] for place in fxn.group_of(node).split(",")))
        assert axis is not None
        kind, size_bytes = fxn.collective_kind(node), fxn.size_bytes(node.meta["val"])
        size_bytes *= axis.size if kind == "reduce_scatter" else 1
        total += costs.launch_time_us(kind, size_bytes, axis.group_name)
    return total


def lies(way: Lying) -> list[Placement]:
    """Between steps, on each axis of the mesh."""
    cut = way.computed if isinstance(way.computed, Shard) else None
    strides = {name: THREE["tp"] if cut == Shard(dim) else 1 for name, dim in way.stored.items()}
    stored = [S(way.stored[name], strides[name]) if name in way.stored else R for name in NAMES]
    return stored if cut is None else [*stored[:2], cut]


@pytest.mark.parametrize("seen", ["gathered", "reduced"])
def test_a_parameter_s_moves_are_priced_as_they_are_launched(seen: str, fake_mesh) -> None:
    """In every way that it may lie. Its module is the first, so that nothing is gathered again for the backward."""
    mesh = fake_mesh(**THREE)
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    graph = captured(module, torch.zeros(4, SHAPE[1]), lambda x: module(x).square().mean(), shards=4)
    placeholders = dict(zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    *batch, axis = plan_axes("auto", mesh)
    costs = costs_of(mesh)
    (weight,) = free_parameters(graph, placeholders, axis, batch, mesh, costs).values()
    assert len({way.gathered_us for way in weight.ways}) > 3 and len({way.reduced_us for way in weight.ways}) > 3
    for way in weight.ways:
        whole = [R, R, way.computed]
        if seen == "gathered":
            assert way.gathered_us == pytest.approx(launches_us(lies(way), whole, mesh, costs)), way
        else:
            assert way.reduced_us == pytest.approx(launches_us([P, P, way.end], lies(way), mesh, costs)), way
