"""Parameters that lead to unused results of a captured call only: no gradient, not one of zeros."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x):
        found = self.body(x).tanh()
        return self.first(found), self.second(found)


class OneOfTwo(Net):
    """The second head's result is never used, as the pooler's of many encoders."""

    strategy: ClassVar = {"capture": "forward", "plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = Heads()

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x)[0], y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3)


class InTurns(OneOfTwo):
    """One task at a time: each head's momentum rests while the other's learns."""

    steps = 5
    strategy: ClassVar = {"capture": "forward", "plan": "ddp"}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x)[batch_idx % 2], y)


@pytest.mark.parametrize("kind", [OneOfTwo, InTurns])
def test_what_no_loss_asks_for_stays_as_it_is(kind, worlds: Worlds) -> None:
    """One device's optimizer skips it: no decay, no step of its momentum."""
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH):
        for name, value in expected.items():
            torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=1e-6, msg=name)


def one_result_each() -> dict[str, bool]:
    """Whether parameters have gradients where the loss is of the first result."""
    module = Heads()
    mesh = build_mesh(MeshSpec.from_mapping(MESH), "cpu")
    made: Any = parallelize(module, (torch.randn(4, 6),), mesh, "ddp", compile=False)
    made(torch.randn(2, 6))[0].sum().backward()
    return {name: parameter.grad is not None for name, parameter in module.named_parameters()}


def test_without_a_trainer(worlds: Worlds) -> None:
    for found in worlds(2).run(one_result_each):
        assert {name for name, has_one in found.items() if not has_one} == {"second.weight", "second.bias"}
