"""What a step's backward reads by a policy: what it recomputes counts only with what is there beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autoparallel.compile import saved_values
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.read_activations import read_activations
from lightning_autoparallel.plan import Activations
from tests.unit._graphs import captured


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)).sigmoid())


class Blocks(nn.Module):
    def __init__(self, has_region: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.has_region = has_region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.has_region else layer(x)
        return x.square().mean()


def graph_of(has_region: bool = False) -> CapturedGraph:
    return captured(Blocks(has_region), torch.randn(8, 4))


def kinds_of(graph: CapturedGraph, read: Activations) -> list[tuple[set[str | None], set[str]]]:
    """Of each set of recomputed values their blocks, and what computes them."""
    nodes = {node.name: node for node in graph.graph_module.graph.nodes}
    return [
        (
            {fxn.block_of(fxn.module_path(nodes[name]) or "") for name in again},
            {nodes[name].target.name().removeprefix("aten::").split(".")[0] for name in again},  # type: ignore[union-attr]
        )
        for again in read.recomputed
    ]


EVERY_BLOCK = [
    ({block}, meeting)
    for block in ("layers.2", "layers.1", "layers.0")
    for meeting in ({"mm", "add"}, {"add", "relu"}, {"relu", "sigmoid"})
]


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_a_block_recomputes_is_there_until_it_has_been_read(policy: str) -> None:
    """A product goes once its bias is added: with what is made of it, but not with all that the block recomputes."""
    graph = graph_of()
    read = read_activations(graph, True, policy)
    assert read.saved == saved_values(graph, True, policy)
    assert kinds_of(graph, read) == EVERY_BLOCK


def test_saved_values_are_not_recomputed() -> None:
    assert read_activations(graph_of(), True, "none").recomputed == ()


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_regions_of_the_users_own_are_recomputed_by_every_policy(policy: str) -> None:
    graph = graph_of(has_region=True)
    assert kinds_of(graph, read_activations(graph, True, policy)) == EVERY_BLOCK
