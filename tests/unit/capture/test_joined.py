"""Calls joined to one graph give what each gives by itself, and the sum of their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.joined import join_calls
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.calls_of_step import CallsOfStep
from tests.unit._graphs import captured, run_captured


class Shared(nn.Module):
    """Two layers and a counter; ``scaled`` reads one layer that ``whole`` reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def whole(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(torch.tanh(self.first(x))).sum()

    def scaled(self, x: Tensor) -> Tensor:
        return (self.first(x) * torch.arange(4.0)).sum()


def calls_of(module: Shared, x: Tensor, y: Tensor) -> list[CapturedGraph]:
    return [captured(module, x, module.whole), captured(module, y, module.scaled)]


def run_joined(joined: CapturedGraph, module: Shared, batches: list[Tensor], tangents: list[float]) -> dict:
    known = {**dict(module.named_parameters()), **dict(module.named_buffers()), **joined.constants}
    values = []
    for node, item in zip(joined.graph_module.graph.find_nodes(op="placeholder"), joined.inputs, strict=True):
        number = item.name.partition(".")[0]
        if item.kind == "tangent":
            values.append(torch.full(node.meta["val"].shape, tangents[int(number)]))
        else:
            values.append((batches[int(number)] if item.kind == "batch" else known[item.name]).detach())
    results = torch.fx.Interpreter(joined.graph_module).run(*values)
    return {(item.kind, item.name): value for item, value in zip(joined.outputs, results, strict=True)}


def test_results_and_gradients_are_those_of_the_calls() -> None:
    torch.manual_seed(0)
    module, x, y = Shared(), torch.randn(5, 4), torch.randn(2, 4)
    calls = calls_of(module, x, y)
    joined = join_calls("both", calls)
    joined.graph_module.graph.lint()
    found = run_joined(joined, module, [x, y], [1.0, 3.0])
    apart = [run_captured(calls[0], module, x), run_captured(calls[1], module, y, tangent=3.0)]
    for number, one in enumerate(apart):
        torch.testing.assert_close(found[("output", f"{number}.0")], one[("output", "0")])
    torch.testing.assert_close(found[("buffer", "calls")], torch.ones(()))
    gradients = {name: value for (kind, name), value in found.items() if kind == "gradient"}
    assert gradients.keys() == dict(module.named_parameters()).keys()
    for name, gradient in gradients.items():
        parts = [one[("gradient", name)] for one in apart if ("gradient", name) in one]
        torch.testing.assert_close(gradient, sum(parts[1:], parts[0]))
    assert joined.local and joined.has_backward


def test_forwards_come_first_and_backwards_in_reverse() -> None:
    module = Shared()
    joined = join_calls("both", calls_of(module, torch.randn(5, 4), torch.randn(2, 4)))
    nodes = [node for node in joined.graph_module.graph.nodes if node.op == "call_function"]
    late = [fxn.is_backward(node) for node in nodes]
    assert late == sorted(late)
    names = [item.name for item in joined.outputs if item.kind == "gradient"]
    assert names[:2] == ["first.weight", "first.bias"]  # the second call's, to which the first one's are added
    counted = [item.name for item in joined.inputs if item.kind in ("parameter", "buffer")]
    assert len(counted) == len(set(counted)) == 5


def test_values_are_of_one_trace() -> None:
    """Calls are traced apart; what is made of both would else mix two fake modes."""
    module = Shared()
    joined = join_calls("both", calls_of(module, torch.randn(5, 4), torch.randn(2, 4)))
    values = [value for node in joined.graph_module.graph.nodes for value in fxn.values(node) if value is not None]
    assert len({id(value.fake_mode) for value in values}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_calls_are_those_of_the_last_training_step_before_the_optimizers(micro_batches: int) -> None:
    graph = captured(module := Shared(), torch.randn(5, 4), module.whole)
    other, calls = replace(graph, name="other"), CallsOfStep()
    for _ in range(micro_batches):
        assert not calls.is_over(7)
        calls.begin(7)
        for one in (graph, other, graph):
            calls.add(one)
    assert calls.begun == micro_batches
    assert calls.is_over(8) and calls.graphs == [graph, other, graph]
    calls.forget()
    assert not calls.is_over(8) and calls.graphs == []


def test_steps_without_calls_are_waited_for_a_few_times() -> None:
    calls = CallsOfStep()
    calls.begin(0)
    for step in (1, 2):
        assert not calls.is_over(step)
        calls.begin(step)
    assert calls.is_over(3)


def test_a_call_that_is_made_again_and_again_counts_a_few_times() -> None:
    graph = captured(module := Shared(), torch.randn(5, 4), module.whole)
    calls = CallsOfStep()
    calls.begin(0)
    for _ in range(100):
        calls.add(graph)
    assert len(calls.graphs) == 8
