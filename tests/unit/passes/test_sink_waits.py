"""Waits move to the first use of what they wait for, with the views in between, and nothing else does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_autoparallel.passes.sink_waits import sink_waits
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import one_group, run_lockstep

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


def _gradients(sizes: list[int], role: str | None) -> fx.Graph:
    """One reduction after another, each of a product made just before it; all results leave the graph."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = []
    for index, size in enumerate(sizes):
        product = graph.create_node("call_function", aten.mul.Tensor, (x, index), name=f"product{index}")
        arguments = (product, "sum", "g")
        reduced = graph.create_node("call_function", collectives.ALL_REDUCE, arguments, name=f"reduced{index}")
        waited = graph.create_node("call_function", collectives.WAIT, (reduced,), name=f"waited{index}")
        product.meta["val"] = reduced.meta["val"] = torch.empty(size)
        reduced.meta["collective_role"] = role
        results.append(waited)
    graph.output(results)
    return graph


def _running(graph: fx.Graph) -> list[set[int]]:
    """The reductions that have begun and are not waited for, behind each start."""
    running: set[int] = set()
    found = []
    for node in graph.nodes:
        if node.name.startswith("reduced"):
            found.append({*running, int(node.name.removeprefix("reduced"))})
            running = found[-1]
        elif node.name.startswith("waited"):
            running = running - {int(node.name.removeprefix("waited"))}
    return found


def test_reductions_of_gradients_are_waited_for_once_two_later_ones_have_begun():
    graph = _gradients([8] * 5, "terminal_reduction")
    notes = sink_waits(graph, outstanding=2)
    graph.lint()
    assert _running(graph) == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]
    # The last wait stands at its use already.
    assert notes == ("4 waits moved to their first use, 3 of them to where later reductions have begun",)


def test_small_reductions_wait_for_as_many_bytes_as_large_ones():
    graph = _gradients([8, 1, 1, 8, 8], "terminal_reduction")
    sink_waits(graph, outstanding=1)
    assert _running(graph) == [{0}, {0, 1}, {1, 2}, {1, 2, 3}, {3, 4}]


def test_only_reductions_of_gradients_are_bounded():
    graph = _gradients([8] * 5, None)
    assert sink_waits(graph, outstanding=1) == ("4 waits moved to their first use",)
    assert _running(graph)[-1] == {0, 1, 2, 3, 4}
