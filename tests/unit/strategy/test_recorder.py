"""What a step does besides computing, as the recorder notices it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_autoparallel.capture import Watcher, capture_step
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.strategy.metrics import MetricScopes
from lightning_autoparallel.strategy.recorder import LightningEffects
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.unit._graphs import request_of

LAYERS = 6


class Logging(nn.Module):
    """Logs a number, of which no tensor tells."""

    def __init__(self, owner: list[LightningModule]) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(4, 4), owner

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].log("calls", 1.0, reduce_fx="sum")
        return x + self.linear(x)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        owner: list[LightningModule] = [self]  # one list: blocks that differ would not be stood in for
        self.layers = nn.Sequential(*(Logging(owner) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("repeat_blocks", [False, True])
def test_every_block_logs_a_number(repeat_blocks: bool):
    init_fake_world(1)
    try:
        scopes = MetricScopes(build_mesh(MeshSpec.from_mapping({"dp_shard": 1}), "cpu"))
        module = Net()
        effects = LightningEffects(module, Watcher({}), lambda message: None, scopes)
        request = request_of(module, torch.ones(3, 4), effects=effects)
        capture_step(dataclasses.replace(request, repeat_blocks=repeat_blocks))
        assert effects.count() == LAYERS
    finally:
        torch.distributed.destroy_process_group()
