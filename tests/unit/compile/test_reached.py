"""Whose gradients depend on which results; a graph by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_autoparallel.compile.reached import reached_gradients
from lightning_autoparallel.contracts import CapturedGraph, GraphInput, GraphOutput

aten = torch.ops.aten


def two_heads() -> CapturedGraph:
    """``body`` leads to both results, ``left`` to the first, ``right`` to the second."""
    graph = fx.Graph()
    names = ("body", "left", "right", "tangent_left", "tangent_right")
    body, left, right, first, second = (graph.placeholder(name) for name in names)
    results = [graph.call_function(aten.mul.Tensor, (body, head)) for head in (left, right)]
    of_left, of_right = (graph.call_function(aten.mul.Tensor, (tangent, body)) for tangent in (first, second))
    through = [graph.call_function(aten.mul.Tensor, pair) for pair in ((first, left), (second, right))]
    graph.output((*results, graph.call_function(aten.add.Tensor, tuple(through)), of_left, of_right))
    inputs = [GraphInput(kind="parameter", name=name) for name in names[:3]]
    inputs += [GraphInput(kind="tangent", name=name) for name in ("0", "1")]
    outputs = [GraphOutput(kind="output", name=name) for name in ("0", "1")]
    outputs += [GraphOutput(kind="gradient", name=name) for name in names[:3]]
    return CapturedGraph(
        name="call",
        graph_module=fx.GraphModule({}, graph),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        output_spec=None,
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [((0,), {"body", "left"}), ((1,), {"body", "right"}), ((0, 1), {"body", "left", "right"}), ((), set())],
)
def test_gradients_of_what_leads_to_a_result(given: tuple[int, ...], names: set[str]) -> None:
    captured = two_heads()
    for _ in range(2):  # found, and kept
        assert reached_gradients(captured, given) == {("parameter", name) for name in names}
