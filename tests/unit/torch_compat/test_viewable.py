"""Views of fake tensors, beside those of real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from lightning_autoparallel.torch_compat.viewable import can_be_viewed

aten = torch.ops.aten
PARTS: list[tuple[tuple[int, ...], Callable[[Tensor], Tensor], list[int]]] = [
    ((2, 64, 2, 2, 2), lambda x: x[:, :, :, 0:1], [2, 8, 8, 4]),  # whose fake tensor says yes
    ((2, 64, 2, 2, 2), lambda x: x[:, :, :, :, 0:1], [2, 8, 8, 4]),
    ((2, 64, 2, 2, 2), lambda x: x[:, :, 0:1], [2, 8, 8, 4]),
    ((2, 64, 2, 2, 2), lambda x: x, [2, 8, 8, 8]),
    ((4, 6), lambda x: x.t(), [24]),
    ((4, 6), lambda x: x[:, :3], [4, 3, 1]),
    ((4, 6), lambda x: x[:, :3], [12]),
    ((4, 1, 6), lambda x: x[:2], [2, 2, 3]),
]


@pytest.mark.parametrize(("shape", "part", "wanted"), PARTS)
def test_what_can_be_viewed_is_what_real_tensors_allow(shape, part, wanted: list[int]):
    real = part(torch.zeros(shape))
    try:
        allowed = real.view(wanted) is not None
    except RuntimeError:
        allowed = False
    with FakeTensorMode():
        assert can_be_viewed(part(torch.zeros(shape)), wanted) is allowed
    assert can_be_viewed(real, wanted) is allowed


def emitted(x: Tensor, dim: int, size: int, wanted: list[int]) -> fx.Graph:
    emitter = GraphEmitter(FakeTensorMode())
    with emitter.fake_mode:
        given = emitter.placeholder("x", torch.empty(x.shape))
    part = emitter.call(aten.slice.Tensor, given, dim, 0, size)
    emitter.graph.output(emitter.view(part, wanted))
    return emitter.graph


def added(x: Tensor, dim: int, size: int, wanted: list[int]) -> fx.Graph:
    graph = fx.Graph()
    given = graph.placeholder("x")
    with FakeTensorMode():
        given.meta["val"] = torch.empty(x.shape)
    calls = Calls(graph.output(given))
    (output,) = graph.find_nodes(op="output")
    output.args = (calls.view(calls(aten.slice.Tensor, given, dim, 0, size), wanted),)
    return graph


@pytest.mark.parametrize("write", [emitted, added])
@pytest.mark.parametrize(("dim", "copies"), [(3, 1), (4, 0), (2, 0), (0, 0)])
def test_a_view_that_is_written_runs(write: Callable[..., fx.Graph], dim: int, copies: int):
    x = torch.randn(2, 64, 2, 2, 2)
    wanted = [2, 8, 8, 4] if dim else [1, 8, 8, 8]
    graph = write(x, dim, 1, wanted)
    result = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(x)
    assert torch.equal(result, x.narrow(dim, 0, 1).reshape(wanted))
    assert len(graph.find_nodes(op="call_function", target=aten.clone.default)) == copies
