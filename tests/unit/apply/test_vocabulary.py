"""A vocabulary that two axes cut, the one inside the other: HSDP's, which are planned as one."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.contracts import NodePlacement, PlanAxis, ShardingPlan
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.hand_made import as_captured

ROWS, REPLICAS, SHARDS = 8, 2, 2
CUT, WHOLE = (Shard(0), Shard(0)), (Replicate(), Replicate())
TOKENS = torch.tensor([[1, 5, 5], [7, 0, 3]])
GRADIENT = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def gradient_of_a_table(rank: int) -> torch.Tensor:
    """What one rank computes of an embedding's gradient whose rows both axes cut."""
    graph, mode = fx.Graph(), FakeTensorMode()
    names = {}
    for name, value in (("gradient", GRADIENT), ("tokens", TOKENS)):
        names[name] = graph.placeholder(name)
        names[name].meta["val"] = mode.from_tensor(value)
    call = graph.call_function(
        torch.ops.aten.embedding_dense_backward.default, (names["gradient"], names["tokens"], ROWS, -1, False)
    )
    call.meta["val"] = mode.from_tensor(torch.empty(ROWS, 4))
    graph.output([call])
    nodes = {name: NodePlacement(inputs=(), outputs=(WHOLE,)) for name in names}
    plan = ShardingPlan(
        name="hsdp",
        axes=(
            PlanAxis(mesh_axes=("dp_replicate",), size=REPLICAS, rank=rank // SHARDS, group_name="0"),
            PlanAxis(mesh_axes=("dp_shard",), size=SHARDS, rank=rank % SHARDS, group_name="1"),
        ),
        joint_axes=(PlanAxis(mesh_axes=("dp_replicate", "dp_shard"), size=4, rank=rank, group_name="2"),),
        nodes={**nodes, call.name: NodePlacement(inputs=(WHOLE, WHOLE), outputs=(CUT,))},
        parameters={},
        outputs=(CUT,),
    )
    (part,) = lower_graph(as_captured(graph), plan).graph_module(GRADIENT, TOKENS)
    return part


def test_ranks_add_up_the_rows_that_both_axes_give_them():
    whole = torch.ops.aten.embedding_dense_backward.default(GRADIENT, TOKENS, ROWS, -1, False)
    parts = [gradient_of_a_table(rank) for rank in range(REPLICAS * SHARDS)]
    assert all(part.shape == (ROWS // 4, 4) for part in parts)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rows_are_those_of_the_joint_rank(rank: int):
    part = gradient_of_a_table(rank)
    touched = {int(token) for token in TOKENS.flatten() if token // 2 == rank}
    assert {2 * rank + i for i, row in enumerate(part) if row.any()} == touched
