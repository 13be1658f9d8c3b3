"""DTensors around a rank's part are those that torch would make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.contracts import Placements


@pytest.fixture
def layout(fake_mesh: Callable[..., Any]) -> ParameterLayout:
    mesh = fake_mesh(dp_replicate=2, dp_shard=2)
    axes = tuple(mesh.plan_axis((name,)) for name in ("dp_replicate", "dp_shard"))
    return ParameterLayout(
        shape=(5, 3), stride=(3, 1), mesh=mesh.device_mesh, placements=(Replicate(), Shard(0)), axes=axes
    )


@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Partial("sum"), Shard(0)), (Shard(1), Replicate())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_as_torch_makes_them(layout: ParameterLayout, placements: Placements, dtype: torch.dtype) -> None:
    layout.distribute(layout.shard_of(torch.randn(5, 3)))  # what was described before is of another dtype, or placement
    other = replace(layout, placements=placements)
    part = other.shard_of(torch.randn(5, 3)).to(dtype)
    expected = DTensor.from_local(
        part, other.mesh, placements, run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    for _ in range(2):
        made = other.distribute(part)
        assert made._spec == expected._spec
        assert made._spec.tensor_meta == expected._spec.tensor_meta
        assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert made.is_leaf and not made.requires_grad
        assert made.to_local().data_ptr() == part.data_ptr()


def test_a_graph_of_gradients_is_not_lost_without_a_word(layout: ParameterLayout) -> None:
    with pytest.raises(AssertionError):
        layout.distribute(torch.randn(3, 3, requires_grad=True) * 2)
