"""A parameter's gather starts before the one ahead of it is waited for; gathers of anything else stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_autoparallel.passes.prefetch_gathers import prefetch_gathers
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import one_group, run_lockstep

aten = torch.ops.aten


def _layers(count: int) -> fx.Graph:
    """x @ w0 @ w1 ...: each weight cast, gathered and waited for right where it is used."""
    graph = fx.Graph()
    weights = [graph.placeholder(f"w{i}") for i in range(count)]
    hidden = graph.placeholder("x")
    for i, weight in enumerate(weights):
        cast = graph.create_node("call_function", aten.neg.default, (weight,), name=f"cast{i}")
        gathered = graph.create_node("call_function", collectives.ALL_GATHER, (cast, 2, "g"), name=f"gather{i}")
        waited = graph.create_node("call_function", collectives.WAIT, (gathered,), name=f"wait{i}")
        hidden = graph.create_node("call_function", aten.mm.default, (hidden, waited), name=f"mm{i}")
    graph.output([hidden])
    return graph


@pytest.mark.parametrize("depth", [1, 2])
def test_a_gather_starts_before_the_wait_depth_places_ahead(depth: int):
    graph = _layers(4)
    notes = prefetch_gathers(graph, depth=depth)
    graph.lint()
    order = [node.name for node in graph.nodes]
    for i in range(4 - depth):
        assert order.index(f"cast{i + depth}") < order.index(f"gather{i + depth}") < order.index(f"wait{i}")
        if i:
            assert order.index(f"gather{i + depth}") > order.index(f"mm{i - 1}")
    assert notes == (f"{4 - depth} gathers started {depth} ahead",)


def test_what_is_computed_does_not_change():
    inputs = [[*(torch.randn(2, 4) for _ in range(3)), torch.randn(3, 4)] for _ in range(2)]
    before = run_lockstep([_layers(3) for _ in range(2)], inputs, one_group("g", 2))
    graphs = [_layers(3) for _ in range(2)]
    for graph in graphs:
        prefetch_gathers(graph)
    torch.testing.assert_close(run_lockstep(graphs, inputs, one_group("g", 2)), before, rtol=0, atol=0)


def test_a_gather_of_what_was_computed_from_the_batch_and_a_weight_stays():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    for value in (x, graph.call_function(aten.mm.default, (x, w)), graph.call_function(aten.rand.default, ([2, 2],))):
        gathered = graph.call_function(collectives.ALL_GATHER, (value, 2, "g"))
        graph.call_function(aten.neg.default, (graph.call_function(collectives.WAIT, (gathered,)),))
    before = [node.name for node in graph.nodes]
    assert prefetch_gathers(graph) == ()
    assert [node.name for node in graph.nodes] == before
