"""Who holds tensors while a step runs: inputs and saved values go when they are read for the last time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.compile import Wiring, run_step
from lightning_autoparallel.compile.backend import interpreted
from lightning_autoparallel.contracts import GraphInput, GraphOutput
from tests.unit._graphs import step_of


class Watched:
    """Says whether the memory of tensors it was shown is still there."""

    def __init__(self) -> None:
        self._storages: dict[str, weakref.ref[Any]] = {}
        self.seen: list[list[str]] = []

    def show(self, **tensors: Tensor) -> None:
        self._storages |= {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}

    def look(self, value: Any = None) -> Any:
        self.seen.append([name for name, storage in self._storages.items() if storage() is not None])
        return value


def test_an_interpreted_graph_frees_inputs_after_their_last_use():
    watched, graph = Watched(), fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    first = graph.call_function(watched.look, (graph.call_function(torch.exp, (a,)),))
    second = graph.call_function(watched.look, (graph.call_function(torch.add, (first, b)),))
    graph.output((second,))
    given = [torch.zeros(2), torch.ones(2)]
    watched.show(a=given[0], b=given[1])
    (result,) = interpreted(fx.GraphModule(torch.nn.Module(), graph))(given)
    assert watched.seen == [["b"], []]
    assert torch.equal(result, torch.full((2,), 2.0))


def test_an_interpreted_graph_returns_an_input_and_ignores_another():
    graph = fx.Graph()
    a, _ = graph.placeholder("a"), graph.placeholder("b")
    graph.output((a, graph.call_function(torch.neg, (a,))))
    call = interpreted(fx.GraphModule(torch.nn.Module(), graph))
    for value in (1.0, 2.0):  # a callable is called once per step
        kept, negated = call([torch.tensor(value), torch.tensor(5.0)])
        assert (float(kept), float(negated)) == (value, -value)


@pytest.mark.parametrize("retain", [False, True])
def test_saved_values_belong_to_the_backward_unless_the_graph_is_retained(retain: bool):
    watched = Watched()

    def forward(given: list[Tensor]) -> list[Tensor]:
        (w,) = given
        given.clear()
        saved = w.cos()
        watched.show(saved=saved)
        return [w.sin(), saved]

    def backward(given: list[Tensor]) -> list[Tensor]:
        gradient = given[0] * given[1]
        given.clear()
        watched.look()
        return [gradient]

    w = torch.tensor(0.5, requires_grad=True)
    inputs = (GraphInput(kind="parameter", name="w", requires_grad=True), GraphInput(kind="tangent", name="0"))
    outputs = (GraphOutput(kind="output", name="0"), GraphOutput(kind="gradient", name="w"))
    step = step_of(inputs, outputs, forward, backward, tangents=[torch.empty(())], saved_values=1)
    (loss,) = run_step(step, [w], Wiring.of(step.partitioned, [None]))
    loss.backward(retain_graph=retain)
    assert watched.seen == [["saved"] if retain else []]
    assert float(w.grad) == pytest.approx(float(torch.tensor(0.5).cos()))
    if retain:
        loss.backward()
        assert float(w.grad) == pytest.approx(2 * float(torch.tensor(0.5).cos()))
        assert watched.seen[1] == []
