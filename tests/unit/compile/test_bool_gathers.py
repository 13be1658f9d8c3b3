"""What Inductor is given gathers bytes where the step gathers booleans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.torch_compat.collectives import init_fake_world
from lightning_autoparallel.torch_compat.inductor import send_bools_as_bytes

c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    init_fake_world(2)
    yield
    torch.distributed.destroy_process_group()


def traced(kept: Tensor) -> fx.GraphModule:
    def step(kept: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(kept > 0, 2, "0"))
        return gathered & True, c10d.wait_tensor(c10d.all_gather_into_tensor(values, 2, "0"))

    return make_fx(step, tracing_mode="fake")(kept, torch.ones(4))


def test_booleans_are_sent_as_bytes():
    module = traced(torch.ones(4))
    before = [node.target for node in module.graph.nodes]
    send_bools_as_bytes(module)
    gathers = [node for node in module.graph.nodes if node.target is c10d.all_gather_into_tensor.default]
    assert [node.args[0].meta["val"].dtype for node in gathers] == [torch.uint8, torch.float32]
    assert [node.meta["val"].dtype for node in gathers] == [torch.uint8, torch.float32]
    assert len(module.graph.nodes) == len(before) + 2
    module.graph.lint()
    first, second = module(torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.ones(4))
    assert first.dtype is torch.bool and second.dtype is torch.float32 and first.shape == second.shape == (8,)
    send_bools_as_bytes(module)
    assert len(module.graph.nodes) == len(before) + 2
