"""How tensors go into a step's graphs and come out, on hand-made ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_autoparallel.apply import ParameterLayout
from lightning_autoparallel.compile import Wiring, run_step
from lightning_autoparallel.compile.wiring import Layouts, detached_where_given, distinct
from lightning_autoparallel.contracts import CompiledStep, GraphCallable, GraphInput, GraphOutput
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.torch_compat.dtensors import part_of
from tests.unit._graphs import step_of

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


def unused(given: list[Tensor]) -> list[Tensor]:
    """What is not called."""
    raise AssertionError


def step(forward: GraphCallable = unused, saved: tuple[int, ...] = ()) -> CompiledStep:
    """One with these inputs and outputs, of which a backward needs ``saved``."""
    tangents, constants = [torch.empty(2, 3)], [torch.ones(1)]
    return step_of(INPUTS, OUTPUTS, forward, unused, tangents=tangents, constants=constants, saved_inputs=saved)


def wired(layouts: Layouts = (None,) * 4, saved: tuple[int, ...] = ()) -> Wiring:
    """How its tensors go in and come out."""
    return Wiring.of(step(saved=saved).partitioned, layouts)


def uneven(mesh: ParallelMesh) -> ParameterLayout:
    """Three rows on two ranks: the second has one, and a row of padding."""
    axes = (mesh.plan_axis(("dp_shard",)),)
    return ParameterLayout(shape=(3, 3), stride=(3, 1), mesh=mesh.device_mesh, placements=(Shard(0),), axes=axes)


def test_places_are_those_of_what_a_step_is_given() -> None:
    wiring = wired(saved=(0, 3, 4, 5))
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
    wiring = wired(saved=(0, 3, 4))
    tensor = torch.ones(3)
    kept = [item.kept(tensor, is_part) is tensor for item in wiring.saved]
    assert kept == [True, False, not is_part]


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_are_padded_and_gradients_are_not(rank: int, fake_mesh: Meshes) -> None:
    layout = uneven(fake_mesh(dp_shard=2, rank=rank))
    whole, rows = replace(layout, placements=(Replicate(),)), 2 - rank
    assert (layout.pads, whole.pads) == (rank == 1, False)
    wiring = wired([layout, whole, None, None])
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
    wiring = wired([layout, None, None, None])
    produced = torch.arange(6.0).reshape(3, 2).t()
    found = wiring.by_input([layout.distribute(torch.ones(2, 3)), None, None, None], [produced])[0]
    assert isinstance(found, DTensor) and found.to_local().stride() == (3, 1)
    assert torch.equal(found.to_local(), produced)


def test_what_does_not_fit_is_refused() -> None:
    wiring = wired()
    with pytest.raises(AssertionError):
        wiring.parts([torch.ones(1)] * 3)
    with pytest.raises(AssertionError):
        wiring.by_input([None] * 4, [])


@pytest.mark.parametrize("grad", [False, True])
def test_a_result_is_never_a_parameters_shard_itself(grad: bool, fake_mesh: Meshes) -> None:
    layout = uneven(fake_mesh(dp_shard=2))
    frozen = torch.nn.Parameter(layout.distribute(torch.ones(2, 3)), requires_grad=False)
    returns = step(lambda given: [given[2], given[1]])
    count, w = torch.zeros(1), torch.ones(1, requires_grad=True)
    wiring = Wiring.of(returns.partitioned, [None, layout, None, None])
    with torch.set_grad_enabled(grad):
        results = run_step(returns, [w, frozen, count, torch.ones(2)], wiring)
    own = part_of(frozen)
    assert results[0] is not count and results[0].data_ptr() == count.data_ptr()
    assert results[1] is not own and results[1].data_ptr() == own.data_ptr()
    assert results[1].requires_grad == grad and not own.requires_grad and own.grad_fn is None


def test_equal_results_become_different_tensors() -> None:
    one, other = torch.ones(2), torch.ones(2)
    results: list[Tensor] = [one, other]
    assert distinct(results) is results
    first, second, third = distinct([one, other, one])
    assert first is one and second is other and third is not one and torch.equal(third, one)
    assert detached_where_given(results, {id(other)})[0] is one
    assert detached_where_given(results, {id(other)})[1] is not other
