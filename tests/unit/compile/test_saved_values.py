"""What a captured step will save is what the partition saves once ranks have their parts of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.compile import partition_graph, saved_values
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.plan import make_plan
from tests.unit._graphs import captured

RANKS = 4


class Scored(Llama3):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_as_much_as_the_partition_saves(policy: str, fake_mesh) -> None:
    mesh = fake_mesh(dp_shard=RANKS)
    model = Scored(llama3_config("debug", {"n_layers": 3}))
    graph = captured(model, torch.zeros(2, 17, dtype=torch.long), shards=RANKS)
    partitioned = partition_graph(lower_graph(graph, make_plan(graph, "fsdp", mesh, print)), True, policy)
    assert partitioned.backward is not None
    first = len(partitioned.saved_inputs)
    saved = partitioned.backward.graph.find_nodes(op="placeholder")[first : first + partitioned.saved_values]
    real = sum(fxn.size_bytes(node.meta["val"]) for node in saved if node.meta["val"].dim())
    names = saved_values(graph, True, policy)
    whole = {node.name: node.meta["val"] for node in graph.graph_module.graph.nodes if node.name in names}
    rowed = sum(fxn.size_bytes(value) / RANKS for value in whole.values() if value.dim() and value.shape[0] % 8 == 0)
    assert rowed == pytest.approx(real, rel=0.02)
