"""What passes a matched edge of a module is marked in the graph, forward and backward, and nothing else changes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_autoparallel.capture import capture_step, check_edges
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from tests.unit._graphs import request_of, run_captured

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


class Pair(NamedTuple):
    left: Tensor
    rest: Any


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor, steps: Tensor) -> Pair:
        y = self.linear(x)
        return Pair(left=y * scale, rest={"twice": [y * 2, steps + 1], "name": "inner"})


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            pair = block(x, scale=x.detach(), steps=torch.arange(6, device=x.device))
            x = self.act(pair.left) + pair.rest["twice"][0] * pair.rest["twice"][1].unsqueeze(1)
        return x.square().mean()


def captured_with(module: nn.Module, *edges: str, run: Any = None, training: bool = True) -> CapturedGraph:
    request = request_of(module, X, run, training=training)
    pairs = tuple(tuple(edge.split(":")) for edge in edges)
    return capture_step(dataclasses.replace(request, edges=pairs))  # type: ignore[arg-type]


def calls(graph: CapturedGraph) -> list[fx.Node]:
    return [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]


def marks(graph: CapturedGraph) -> list[tuple[str, bool]]:
    """Edges in order, and whether each stands in the backward; only aliases may carry one."""
    found = [node for node in calls(graph) if fxn.custom(node, "edge") or node.target is torch.ops.aten.alias.default]
    assert all(node.target is torch.ops.aten.alias.default for node in found)
    return [(fxn.custom(node, "edge"), fxn.is_backward(node)) for node in found]


def test_outputs_of_any_nesting_and_their_gradients():
    """Two tensors of each block; its integer output is no activation."""
    found = marks(captured_with(Outer(), "outputs:blocks.?"))
    edges = [f"outputs:blocks.{block}" for block in (0, 0, 1, 1, 1, 1, 0, 0)]
    assert found == [(edge, i >= 4) for i, edge in enumerate(edges)]


def test_inputs_by_position_and_by_keyword():
    graph = captured_with(Outer(), "inputs:blocks.1")
    # x and scale; scale needs no gradient, and integers are no activations.
    assert marks(graph) == [("inputs:blocks.1", False)] * 2 + [("inputs:blocks.1", True)]


def test_marks_that_follow_each_other_keep_their_names():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    graph = captured_with(module, "outputs:0", "inputs:1", run=lambda x: module(x).sum())
    names = ["outputs:0", "inputs:1", "inputs:1", "outputs:0"]
    assert marks(graph) == [(name, i >= 2) for i, name in enumerate(names)]


def test_a_gradient_is_marked_between_its_uses():
    """The mark stands on the gradient of the value: what the layer's own backward takes."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    graph = captured_with(module, "outputs:0", run=lambda x: module(x).sum())
    (mark,) = [node for node in calls(graph) if fxn.custom(node, "edge") and fxn.is_backward(node)]
    assert mark.args[0].target is torch.ops.aten.tanh_backward.default
    assert {user.target for user in mark.users} >= {torch.ops.aten.sum.dim_IntList}
    assert not any(fxn.is_backward(user) for user in mark.args[0].users if user is not mark)


@pytest.mark.parametrize("edges", [(), ("outputs:*", "inputs:*")], ids=["none", "all"])
def test_the_program_is_the_same(edges):
    torch.manual_seed(2)
    module = Outer()
    loss = module(X)
    loss.backward()
    outputs = run_captured(captured_with(module, *edges), module, X)
    assert torch.equal(outputs.pop(("output", "0")), loss.detach())
    for (_, name), value in outputs.items():
        torch.testing.assert_close(value, module.get_parameter(name).grad)


def described(node: fx.Node) -> tuple[Any, ...]:
    keys = ("module", "checkpoint_region")
    return str(node.target), fxn.is_backward(node), *(fxn.custom(node, key) for key in keys)


def test_annotations_of_other_nodes_stay():
    plain, marked = captured_with(Outer()), captured_with(Outer(), "outputs:*", "inputs:*")
    rest = [described(node) for node in calls(marked) if not fxn.custom(node, "edge")]
    assert rest == [described(node) for node in calls(plain)]
    assert marks(plain) == []


def test_marks_belong_to_their_module_and_region():
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def step(x: Tensor) -> Tensor:
        return checkpoint(module[1], module[0](x), use_reentrant=False).sum()

    graph = captured_with(module, "outputs:*", run=step)
    found = [node for node in calls(graph) if fxn.custom(node, "edge")]
    assert [fxn.custom(node, "module") for node in found] == ["0", "1", "1", "0"]
    regions = [fxn.custom(node, "checkpoint_region") for node in found]
    assert regions[0] is regions[3] is None and regions[1] is not None and regions[1] == regions[2]
    assert all("test_edges.py" in fxn.custom(node, "source") for node in found)


def test_without_training_the_values_alone_are_marked():
    assert marks(captured_with(Outer(), "outputs:act", training=False)) == [("outputs:act", False)] * 2


def test_hooks_do_not_stay():
    module = Outer()
    captured_with(module, "outputs:*", "inputs:*")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class ReadsAConstant(nn.Module):
    """As torch's encoders do with masks: what was made of numbers alone may be read."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask if bool(mask.sum() > 0) else x


def test_constants_stay_known():
    module = nn.Sequential(nn.Linear(4, 4), ReadsAConstant())
    graph = captured_with(module, "inputs:1", run=lambda x: module[1](module[0](x), torch.ones(4)).sum())
    assert marks(graph) == [("inputs:1", False), ("inputs:1", True)]


class FillsZeros(nn.Module):
    """Writes what it computes into a tensor of zeros, and returns that or a view made before."""

    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.linear, self.returns_view = nn.Linear(4, 4), returns_view

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(6, 4, device=x.device)
        view = out.view(4, 6)
        out[:, :3] = self.linear(x)[:, :3]
        return view if self.returns_view else out


@pytest.mark.parametrize("returns_view", [False, True])
def test_constants_that_were_written_into_are_none(returns_view: bool):
    module = nn.Sequential(FillsZeros(returns_view), nn.Identity())
    expected = [("outputs:0", False), ("inputs:1", False), ("inputs:1", True), ("outputs:0", True)]
    assert marks(captured_with(module, "outputs:0", "inputs:1", run=lambda x: module(x).square().sum())) == expected


def test_constants_that_are_only_read_by_a_change_in_place_stay_known():
    module = nn.Sequential(nn.Linear(4, 4), ReadsAConstant())

    def run(x: Tensor) -> Tensor:
        mask = torch.ones(4)
        return module[1](module[0](x).clone().add_(mask), mask).sum()

    assert marks(captured_with(module, "inputs:1", run=run)) == [("inputs:1", False), ("inputs:1", True)]


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.act(x)
        return x.sum()


def test_inputs_that_the_module_changes_are_refused():
    with pytest.raises(ConfigError, match=re.escape("rule 'inputs:act': ReLU changes its input in place; pin the")):
        captured_with(ChangesItsInput(), "inputs:act")
    assert marks(captured_with(ChangesItsInput(), "outputs:act")) == []  # nothing uses what it returns


@pytest.mark.parametrize("edge", ["outputs:blocks.?", "inputs:blocks.1.linear", "outputs:*"])
def test_globs_that_match(edge: str):
    kind, pattern = edge.split(":")
    check_edges(Outer(), [(kind, pattern)])


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ("outputs:*.ffn", "rule 'outputs:*.ffn' matches no module; nearest: "),
        ("inputs:block.0", "rule 'inputs:block.0' matches no module; nearest: blocks.0"),
        ("inputs:Blocks.0", "nearest: blocks.0"),
    ],
)
def test_globs_that_match_nothing(edge: str, message: str):
    kind, pattern = edge.split(":")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_edges(Outer(), [("outputs", "act"), (kind, pattern)])
