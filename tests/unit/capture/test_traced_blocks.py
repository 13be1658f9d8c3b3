"""Repeated blocks traced once: the graph is the one of a step traced whole, and blocks that differ are traced alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_autoparallel.capture import capture_step
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.fx import nodes as fxn
from tests.support.tiers import tiered
from tests.unit._graphs import request_of, run_captured

LAYERS = 8
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """Two products, and a mask that is known when the step is traced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = 1.0 if mask.sum().item() == 15 else 2.0
        return x + scale * self.down(torch.tanh(self.up(self.norm(x)))) * mask.tril()[:, :1]


class Numbered(Block):
    """Knows which layer it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) * (1 + self.number)


class Counting(Block):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum((0, 1)))
        return super().forward(x, mask)


class InPlace(Block):
    """Changes its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x.add_(super().forward(x.clone(), mask))
        return x


class Keeping(Block):
    """Leaves something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.last = super().forward(x, mask)
        return self.last


class Regions(Block):
    """Has a checkpoint region inside."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(super().forward, x, mask, use_reentrant=False)  # type: ignore[no-any-return]


class Pair(Block):
    """Gives back one of its inputs beside its result."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, mask), mask


class Side:
    """Something that is no module, of which several hold one."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.scale: Tensor | None = None


class Appending(Block):
    """Leaves a term of the loss in an object that its parent reads, as mixtures of experts do."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = super().forward(x, mask)
        self.side.values.append(self.term(made))
        return made

    def term(self, made: Tensor) -> Tensor:
        return made.square().mean()


class AppendingDetached(Appending):
    """Leaves what is not differentiated."""

    def term(self, made: Tensor) -> Tensor:
        return super().term(made).detach()


class AppendingView(Appending):
    """Leaves another name of its own result."""

    def term(self, made: Tensor) -> Tensor:
        return made.view(-1)[0]


class Reading(Appending):
    """Reads what was left there by somebody else."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert self.side.scale is not None
        return Block.forward(self, x, mask) * self.side.scale


class Biased(Block):
    """The first one is called without a bias."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        made = super().forward(x, mask)
        return made if bias is None else made + bias


class Stack(nn.Module):
    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(build(i) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.embed(x), torch.ones(5, 5).tril()
        for layer in self.layers:
            result = layer(x, mask)
            x, mask = result if isinstance(result, tuple) else (result, mask)
        return x.square().mean()


def capture(module: nn.Module, repeat_blocks: bool, **changes: object) -> tuple[CapturedGraph, int]:
    """The graph, and how often a block ran, told by its one tanh: a step may not count by itself."""
    request = dataclasses.replace(request_of(module, X), repeat_blocks=repeat_blocks, **changes)  # type: ignore[arg-type]
    with mock.patch.object(torch, "tanh", wraps=torch.tanh) as tanh:
        return capture_step(request), tanh.call_count


def kinds(graph: CapturedGraph) -> Counter[tuple[object, ...]]:
    """What the graph's nodes are; sums of gradients belong to no module when all is traced."""
    return Counter(
        (str(node.target), fxn.custom(node, "source"), fxn.is_backward(node), fxn.edge_of(node))
        for node in graph.graph_module.graph.nodes
        if node.op == "call_function"
    )


def modules(graph: CapturedGraph) -> set[str]:
    return {fxn.custom(node, "module") or "" for node in graph.graph_module.graph.nodes}


class SideStack(nn.Module):
    """Blocks that share something beside their arguments."""

    def __init__(self, build: Callable[[Side], nn.Module]) -> None:
        super().__init__()
        self.side = Side()
        self.stack = Stack(lambda i: build(self.side))

    def forward(self, x: Tensor) -> Tensor:
        self.side.values.clear()
        self.side.scale = x.detach().mean().exp()
        return self.stack(x) + sum(self.side.values)


class BiasedStack(Stack):
    """Passes one block less than the others get."""

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.embed(x), torch.ones(5, 5).tril()
        bias = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, mask, bias if layer is not self.layers[0] else None)
        return x.square().mean()


REPEATED = {"plain": lambda i: Block(), "regions": lambda i: Regions(), "pair": lambda i: Pair()}
ALONE: dict[str, Callable[[int], nn.Module]] = {
    "numbered": Numbered,
    "counting": lambda i: Counting(),
    "in_place": lambda i: InPlace(),
    "keeping": lambda i: Keeping(),
}

ASIDE: dict[str, Callable[[Side], nn.Module]] = {
    "appending": Appending,
    "appending_detached": AppendingDetached,
    "appending_view": AppendingView,
    "reading": Reading,
}


SHORT = {"plain", "in_place", "counting", "appending", "regions", "reading"}


@pytest.mark.parametrize("name", tiered([*REPEATED, *ALONE, *ASIDE], SHORT.__contains__))
def test_the_graph_is_that_of_a_step_traced_whole(name: str):
    module = SideStack(ASIDE[name]) if name in ASIDE else Stack((REPEATED | ALONE)[name])
    graph, calls = capture(module, True)
    whole, all_calls = capture(module, False)
    assert kinds(graph) == kinds(whole)
    assert modules(graph) == modules(whole)
    results, expected = run_captured(graph, module, X), run_captured(whole, module, X)
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(results[key], value), key
    # once as a trial, twice as a template; the first and the last block each time that the step runs
    assert all_calls == 2 * LAYERS
    assert calls == (2 + 1 + 2 + 2 * 2 if name in REPEATED else calls)
    assert calls < 2 * LAYERS if name in REPEATED else calls >= 2 * LAYERS


def test_a_first_call_of_fewer_tensors_is_like_none_of_the_others():
    module = BiasedStack(lambda i: Biased())
    graph, _ = capture(module, True)
    whole, _ = capture(module, False)
    assert kinds(graph) == kinds(whole)
    for key, value in run_captured(whole, module, X).items():
        assert torch.equal(run_captured(graph, module, X)[key], value), key


def test_blocks_of_different_sizes_hooks_or_modes_are_apart():
    wide = Stack(lambda i: Block() if i % 2 else nn.Sequential())
    hooked, frozen, evaluated = (Stack(lambda i: Block()) for _ in range(3))
    hooked.layers[2].up.register_forward_hook(lambda module, inputs, output: output * 2)
    frozen.layers[2].up.weight.requires_grad_(False)
    evaluated.layers[3].eval()
    for module in (hooked, frozen, evaluated):
        graph, _ = capture(module, True)
        whole, _ = capture(module, False)
        assert kinds(graph) == kinds(whole)
        for key, value in run_captured(whole, module, X).items():
            assert torch.equal(run_captured(graph, module, X)[key], value), key
    assert len(wide.layers) == LAYERS


def regions(graph: CapturedGraph) -> dict[str, set[int]]:
    """Numbers of checkpoint regions by block."""
    found: dict[str, set[int]] = {}
    for node in graph.graph_module.graph.nodes:
        region, module = fxn.custom(node, "checkpoint_region"), fxn.custom(node, "module")
        if region is not None and module:
            found.setdefault(".".join(module.split(".")[:2]), set()).add(region)
    return found


def test_every_copy_has_checkpoint_regions_of_its_own():
    found = regions(capture(Stack(lambda i: Regions()), True)[0])
    assert sorted(found) == [f"layers.{i}" for i in range(LAYERS)]
    assert all(len(numbers) == 1 for numbers in found.values())
    assert len(set.union(*found.values())) == LAYERS


def marks(graph: CapturedGraph) -> Counter[str | None]:
    return Counter(fxn.edge_of(node) for node in graph.graph_module.graph.nodes if isinstance(node, fx.Node))


@pytest.mark.parametrize("pattern", ["layers.*.up", "layers.*", "layers.2.up"])
def test_marked_edges_inside_of_blocks_are_copied_and_renamed(pattern: str):
    module, edges = Stack(lambda i: Block()), (("outputs", pattern),)
    graph, calls = capture(module, True, edges=edges)
    whole, all_calls = capture(module, False, edges=edges)
    assert marks(graph) == marks(whole)
    assert calls < all_calls


def test_inference_is_traced_once_too():
    module = Stack(lambda i: Block())
    graph, calls = capture(module, True, training=False)
    whole, all_calls = capture(module, False, training=False)
    assert kinds(graph) == kinds(whole)
    assert calls < all_calls
    assert not graph.has_backward


def test_autocast_inside_of_blocks_is_the_steps():
    module = Stack(lambda i: Block())

    def run(values: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(values[0]).float()

    graph, calls = capture(module, True, run=run)
    whole, all_calls = capture(module, False, run=run)
    assert kinds(graph) == kinds(whole)
    assert calls < all_calls
