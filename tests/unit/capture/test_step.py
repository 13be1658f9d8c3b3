"""Captured steps of hand-made modules: what goes in, what comes out, and that it computes what torch does."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autoparallel.capture import capture_step
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.tracing import active_fake_mode
from tests.unit._graphs import captured, request_of, run_captured

HERE = Path(__file__).name
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


class Counting(nn.Module):
    """One buffer changed in place, one reassigned, one only read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        for name in ("in_place", "reassigned", "read"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(x.sum(0))
        self.reassigned = self.reassigned * 0.5 + x.amax(0)
        return (x * self.weight * self.read + self.in_place).sum()


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x)).square().sum()


class Dense(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


def names(graph, kind: str) -> list[str]:
    return [item.name for item in graph.inputs if item.kind == kind]


def results(graph, kind: str) -> list[str]:
    return [item.name for item in graph.outputs if item.kind == kind]


@pytest.mark.parametrize("build", [Tied, Counting, Partly, Dense])
def test_it_computes_what_torch_does(build):
    torch.manual_seed(0)
    module, eager = build(), build()
    eager.load_state_dict(module.state_dict())
    outputs = run_captured(captured(module, X), module, X)
    loss = eager(X)
    loss.backward()
    torch.testing.assert_close(outputs.pop(("output", "0")), loss.detach())
    for (kind, name), value in outputs.items():
        expected = eager.get_parameter(name).grad if kind == "gradient" else eager.get_buffer(name)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    gradients = {name for kind, name in outputs if kind == "gradient"}
    assert gradients == {name for name, parameter in eager.named_parameters() if parameter.grad is not None}


def test_tied_weights_are_one_input():
    graph = captured(Tied(), X)
    assert names(graph, "parameter") == ["first.weight", "second.bias"]
    assert sorted(results(graph, "gradient")) == ["first.weight", "second.bias"]


def test_changed_buffers_are_outputs():
    module = Counting()
    graph = captured(module, X)
    assert names(graph, "buffer") == ["in_place", "reassigned", "read"]
    assert sorted(results(graph, "buffer")) == ["in_place", "reassigned"]
    assert torch.equal(module.in_place, torch.ones(4)) and torch.equal(module.reassigned, torch.ones(4))


def test_frozen_and_unused_parameters_have_no_gradient():
    graph = captured(Partly(), X)
    assert sorted(results(graph, "gradient")) == ["used.bias", "used.weight"]
    assert [item.requires_grad for item in graph.inputs if item.name == "frozen.weight"] == [False]


def test_the_graph_is_of_the_global_batch():
    graph = captured(Tied(), X, shards=3)
    (node,) = [
        node
        for node, item in zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True)
        if item.kind == "batch"
    ]
    assert node.meta["val"].shape == (18, 4)


def test_without_training_there_is_no_backward():
    graph = captured(Tied(), X, training=False)
    assert not graph.has_backward and results(graph, "gradient") == []
    assert names(graph, "tangent") == []


def test_nodes_know_their_module_and_line():
    graph = captured(Tied(), X)
    line = inspect.getsourcelines(Tied.forward)[1] + 1
    relu = [node for node in graph.graph_module.graph.nodes if node.target is torch.ops.aten.relu.default]
    assert [fxn.custom(node, "source") for node in relu] == [f"{HERE}:{line}"]
    multiplied = {fxn.custom(n, "module") for n in graph.graph_module.graph.nodes if "mm" in str(n.target)}
    assert multiplied == {"first", "second"}
    assert all(not fxn.is_backward(node) for node in relu)


def test_no_fake_mode_and_no_fake_tensor_stays():
    module = Counting()
    capture_step(request_of(module, X))
    assert active_fake_mode() is None
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in (*module.parameters(), *module.buffers()))
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_regions_are_marked(use_reentrant: bool):
    module = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def step(x: Tensor) -> Tensor:
        x = module[0](x).sin()
        for layer in (module[1], module[2]):
            x = checkpoint(lambda y, layer=layer: layer(y).cos(), x, use_reentrant=use_reentrant)
        return x.sum()

    graph = captured(module, X, step)
    forward = [node for node in graph.graph_module.graph.nodes if not fxn.is_backward(node)]
    region = {str(n.target): fxn.custom(n, "checkpoint_region") for n in forward if "sin" in str(n.target)}
    cosines = [fxn.custom(node, "checkpoint_region") for node in forward if node.target is torch.ops.aten.cos.default]
    assert set(region.values()) == {None}
    assert None not in cosines and len(set(cosines)) == len(cosines) == 2


def test_a_container_that_grows_is_as_it_was_after_the_capture():
    module = Tied()
    module.kept = []

    def step(x: Tensor) -> Tensor:
        module.kept.append(1)
        return module(x)

    captured(module, X, step)
    assert module.kept == []


def test_squeezes_name_the_dims_that_go():
    """A rank's shard of one row must not be squeezed away with them."""
    graph = captured(Tied(), X, lambda x: (x.unsqueeze(1).squeeze() + x.unsqueeze(1).squeeze(1)).sum(), training=False)
    squeezes = [node for node in graph.graph_module.graph.nodes if str(node.target).startswith("aten.squeeze")]
    assert [node.args[1] for node in squeezes] == [[1], [1]]
