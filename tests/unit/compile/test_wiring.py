"""How tensors go into a step's graphs and come out, on hand-made ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_autoparallel.apply import ParameterLayout
from lightning_autoparallel.compile import Wiring, run_step
from lightning_autoparallel.compile.wiring import detached_where_given, distinct
from lightning_autoparallel.contracts import (
    CapturedGraph,
    CompiledStep,
    GraphInput,
    GraphOutput,
    PartitionedGraph,
    ShardedGraph,
)
from lightning_autoparallel.mesh import ParallelMesh
from tests.unit._graphs import report_of

Meshes = Callable[..., ParallelMesh]
INPUTS = (
    GraphInput(kind="parameter", name="w", requires_grad=True),
    GraphInput(kind="tangent", name="0"),
    GraphInput(kind="parameter", name="frozen"),
    GraphInput(kind="buffer", name="count"),
    GraphInput(kind="buffer", name="table"),
    GraphInput(kind="constant", name="c"),
)
OUTPUTS = (
    GraphOutput(kind="buffer", name="count"),
    GraphOutput(kind="output", name="0"),
    GraphOutput(kind="gradient", name="w"),
)


def partitioned(saved: tuple[int, ...] = ()) -> PartitionedGraph:
    """A graph in two that has these inputs and outputs, and no calls."""
    module, backward = fx.GraphModule(torch.nn.Module(), fx.Graph()), fx.Graph()
    backward.placeholder("tangent").meta["val"] = torch.empty(2, 3)
    sharded = ShardedGraph(
        name="step",
        graph_module=module,
        inputs=INPUTS,
        outputs=OUTPUTS,
        output_placements=(None,) * 3,
        axes=(),
        has_backward=True,
    )
    backward.output(())
    backward_module = fx.GraphModule(torch.nn.Module(), backward)
    return PartitionedGraph(sharded=sharded, forward=module, backward=backward_module, saved_inputs=saved)


def uneven(mesh: ParallelMesh) -> ParameterLayout:
    """Three rows on two ranks: the second has one, and a row of padding."""
    axes = (mesh.plan_axis(("dp_shard",)),)
    return ParameterLayout(shape=(3, 3), stride=(3, 1), mesh=mesh.device_mesh, placements=(Shard(0),), axes=axes)


def step_of(forward: Any) -> CompiledStep:
    """A step that returns what ``forward`` does, and has no backward."""
    graphs = partitioned()
    captured = CapturedGraph(name="step", graph_module=graphs.forward, inputs=INPUTS, outputs=OUTPUTS, output_spec=None)
    return CompiledStep(
        partitioned=graphs,
        forward=forward,
        backward=None,
        captured=captured,
        constants=(torch.ones(1),),
        report=report_of(mesh={}),
    )


def test_places_are_those_of_what_a_step_is_given() -> None:
    wiring = Wiring.of(partitioned(saved=(0, 3, 4, 5)), [None] * 4)
    assert [item.name for item in wiring.inputs] == ["w", "frozen", "count", "table"]
    assert (wiring.results, wiring.differentiable, wiring.gradients) == (2, (1,), ((0, 0),))
    assert [tangent.shape for tangent in wiring.tangents] == [(2, 3)]
    assert [(item.place, item.is_buffer, item.is_written) for item in wiring.saved] == [
        (0, False, False),
        (2, True, True),
        (3, True, False),
        (4, False, False),
    ]


@pytest.mark.parametrize("is_part", [False, True])
def test_the_backward_reads_buffers_as_they_were(is_part: bool) -> None:
    wiring = Wiring.of(partitioned(saved=(0, 3, 4)), [None] * 4)
    tensor = torch.ones(3)
    kept = [item.kept(tensor, is_part) is tensor for item in wiring.saved]
    assert kept == [True, False, not is_part]


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_are_padded_and_gradients_are_not(rank: int, fake_mesh: Meshes) -> None:
    layout = uneven(fake_mesh(dp_shard=2, rank=rank))
    whole, rows = replace(layout, placements=(Replicate(),)), 2 - rank
    assert (layout.pads, whole.pads) == (rank == 1, False)
    wiring = Wiring.of(partitioned(), [layout, whole, None, None])
    shard = layout.distribute(torch.ones(rows, 3))
    given = [torch.nn.Parameter(shard), whole.distribute(torch.ones(3, 3)), torch.ones(1), torch.ones(2)]
    parts = wiring.parts(given)
    assert [tuple(part.shape) for part in parts] == [(2, 3), (3, 3), (1,), (2,)]
    assert all(not isinstance(part, DTensor) and not part.requires_grad for part in parts)
    assert parts[0].sum() == rows * 3
    gradient, *others = wiring.by_input([given[0], None, None, None], [torch.full((2, 3), 7.0)])
    assert others == [None, None, None]
    assert isinstance(gradient, DTensor) and gradient.shape == (3, 3)
    assert torch.equal(gradient.to_local(), torch.full((rows, 3), 7.0))


def test_gradients_lie_as_parts_of_parameters_do(fake_mesh: Meshes) -> None:
    layout = uneven(fake_mesh(dp_shard=2))
    wiring = Wiring.of(partitioned(), [layout, None, None, None])
    produced = torch.arange(6.0).reshape(3, 2).t()
    found = wiring.by_input([layout.distribute(torch.ones(2, 3)), None, None, None], [produced])[0]
    assert isinstance(found, DTensor) and found.to_local().stride() == (3, 1)
    assert torch.equal(found.to_local(), produced)


def test_a_result_is_never_a_parameters_shard_itself(fake_mesh: Meshes) -> None:
    layout = uneven(fake_mesh(dp_shard=2))
    shard = torch.nn.Parameter(layout.distribute(torch.ones(2, 3)))
    step = step_of(lambda given: [given[2], given[0]])
    wiring = Wiring.of(step.partitioned, [layout, None, None, None])
    count = torch.zeros(1)
    results = run_step(step, [shard, torch.ones(1), count, torch.ones(2)], wiring)
    own = shard.to_local()
    assert results[0] is not count and results[0].data_ptr() == count.data_ptr()
    results[1].requires_grad_()
    assert results[1].data_ptr() == own.data_ptr() and not wiring.parts([shard])[0].requires_grad


def test_equal_results_become_different_tensors() -> None:
    one, other = torch.ones(2), torch.ones(2)
    results: list[Tensor] = [one, other]
    assert distinct(results) is results
    first, second, third = distinct([one, other, one])
    assert first is one and second is other and third is not one and torch.equal(third, one)
    assert detached_where_given(results, {id(other)})[0] is one
    assert detached_where_given(results, {id(other)})[1] is not other
