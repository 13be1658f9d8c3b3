"""A product and its bias become one operator where nothing stands between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.passes.join_biases import join_biases
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten


def draft(*shapes: tuple[int, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph with inputs of these shapes."""
    graph = fx.Graph()
    nodes = []
    for index, shape in enumerate(shapes):
        node = graph.placeholder(f"x{index}")
        node.meta["val"] = torch.empty(shape)
        nodes.append(node)
    return graph, nodes


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    if target in (collectives.ALL_REDUCE, collectives.WAIT):
        node.meta["val"] = args[0].meta["val"]
    else:
        node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
    return node


def finished(graph: fx.Graph, *results: fx.Node) -> list[Any]:
    graph.output(list(results))
    join_biases(graph)
    graph.lint()
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_product_its_views_and_its_bias():
    graph, (x, w, b) = draft((6, 4), (4, 8), (8,))
    shown = call(graph, aten.view.default, call(graph, aten.mm.default, x, w), [2, 3, 8])
    cast = call(graph, aten.neg.default, b)  # the bias is ready after the product only
    assert finished(graph, call(graph, aten.add.Tensor, shown, cast)) == [
        aten.neg.default,
        aten.addmm.default,
        aten.view.default,
    ]
    x, w, b = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8)
    (result,) = fx.GraphModule({}, graph)(x, w, b)
    torch.testing.assert_close(result, (x @ w).view(2, 3, 8) - b)


def test_without_views():
    graph, (x, w, b) = draft((6, 4), (4, 8), (8,))
    assert finished(graph, call(graph, aten.add.Tensor, call(graph, aten.mm.default, x, w), b)) == [aten.addmm.default]


@pytest.mark.parametrize("case", ["reduced", "read twice", "no vector", "other dtype"])
def test_what_is_left_alone(case: str):
    graph, (x, w, b) = draft((6, 4), (4, 8), (6, 8) if case == "no vector" else (8,))
    if case == "other dtype":
        b.meta["val"] = b.meta["val"].double()
    product = call(graph, aten.mm.default, x, w)
    source = product
    if case == "reduced":
        source = call(graph, collectives.WAIT, call(graph, collectives.ALL_REDUCE, product, "sum", "g"))
    added = call(graph, aten.add.Tensor, source, b)
    targets = finished(graph, added, *([product] if case == "read twice" else []))
    assert aten.addmm.default not in targets and aten.add.Tensor in targets
