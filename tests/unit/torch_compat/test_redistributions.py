"""Which changes of a DTensor's placements have ranks send something."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from lightning_autoparallel.torch_compat.redistributions import redistributions_told

R, CUT, OTHER = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        ({"dp_shard": 2, "tp": 2}, (CUT, R), (R, R)),
        ({"dp_shard": 2, "tp": 2}, (R, R), (CUT, OTHER)),
        ({"dp_shard": 2, "tp": 2}, (R, CUT), (OTHER, CUT)),
        ({"dp_shard": 2, "tp": 2}, (R, CUT), (CUT, CUT)),  # the inner cut is undone for the outer one
        ({"dp_shard": 2, "tp": 2}, (CUT, R), (OTHER, R)),
        ({"dp_shard": 1, "tp": 4}, (CUT, R), (R, R)),
    ],
)
def test_it_is_told_where_something_is_sent(
    sizes: dict[str, int], before: Sequence[Placement], after: Sequence[Placement], fake_mesh
) -> None:
    mesh = fake_mesh(**sizes).device_mesh
    tensor, told = DTensor.from_local(torch.ones(4, 4), mesh, before, run_check=False), []
    with redistributions_told(lambda: told.append(1)), CommDebugMode() as counted:
        tensor.redistribute(mesh, after)
    assert bool(told) == bool(counted.get_total_counts())


def test_operators_that_begin_with_it_are_told(fake_mesh) -> None:
    mesh = fake_mesh(dp_shard=2).device_mesh
    tensor, told = DTensor.from_local(torch.ones(4, 4), mesh, [CUT], run_check=False), []
    with redistributions_told(lambda: told.append(1)):
        tensor.exp().softmax(1)
        assert told == []
        tensor.softmax(0)
        tensor.full_tensor()
    assert told == [1, 1]
