"""Waits move to the first use of what they wait for, with the views in between, and nothing else does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_autoparallel.passes.sink_waits import sink_waits
from lightning_autoparallel.torch_compat import collectives
from tests.lockstep import one_group, run_lockstep

aten = torch.ops.aten


def _graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A reduction whose result is used by the last call only, through two views; another call in between."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {"x": graph.placeholder("x"), "y": graph.placeholder("y")}

    def call(name: str, target: Any, *args: Any) -> None:
        nodes[name] = graph.create_node("call_function", target, args, name=name)
        nodes[name].meta["val"] = torch.empty(4, 4)

    call("reduced", collectives.ALL_REDUCE, nodes["x"], "sum", "g")
    call("waited", collectives.WAIT, nodes["reduced"])
    call("flat", aten.view.default, nodes["waited"], [16])
    call("turned", aten.t.default, nodes["waited"])
    call("work", aten.mul.Tensor, nodes["y"], 2)
    call("first", aten.add.Tensor, nodes["work"], nodes["turned"])
    call("last", aten.sum.default, nodes["flat"])
    graph.output([nodes["first"], nodes["last"]])
    return graph, nodes


def test_a_wait_and_its_views_move_to_their_first_use():
    graph = _graph()[0]
    notes = sink_waits(graph)
    graph.lint()
    order = [node.name for node in graph.nodes]
    assert order.index("work") < order.index("waited") < order.index("turned") < order.index("first")
    assert order.index("flat") == order.index("last") - 1
    assert order.index("reduced") < order.index("work")
    assert notes == ("1 waits moved to their first use",)


def test_two_views_read_by_one_call_stay_behind_their_wait():
    graph = fx.Graph()
    x = graph.placeholder("x")
    waited = graph.call_function(collectives.WAIT, (graph.call_function(collectives.ALL_REDUCE, (x, "sum", "g")),))
    views = [graph.call_function(aten.t.default, (waited,)), graph.call_function(aten.view.default, (waited, [4, 4]))]
    graph.call_function(aten.neg.default, (x,))
    graph.output([graph.call_function(aten.add.Tensor, tuple(views))])
    sink_waits(graph)
    graph.lint()


def test_what_is_computed_does_not_change():
    inputs = [[torch.randn(4, 4), torch.randn(4, 4)] for _ in range(2)]
    before = run_lockstep([_graph()[0] for _ in range(2)], inputs, one_group("g", 2))
    graphs = [_graph()[0] for _ in range(2)]
    for graph in graphs:
        sink_waits(graph)
    torch.testing.assert_close(run_lockstep(graphs, inputs, one_group("g", 2)), before, rtol=0, atol=0)


def test_nothing_to_move_is_nothing_to_say():
    graph = fx.Graph()
    waited = graph.call_function(
        collectives.WAIT, (graph.call_function(collectives.ALL_REDUCE, (graph.placeholder("x"), "sum", "g")),)
    )
    graph.output([waited])
    assert sink_waits(graph) == ()
