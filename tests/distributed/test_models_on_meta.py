"""Models built in memory or on meta start from one device's weights and keep this rank's rows only."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.worlds import Worlds

LARGE = 1031  # rows of the large layer: no multiple of two


class Sizes(Net):
    """Layers whose rows do not divide, a large one, a tied one, a norm, an embedding and a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "memory":
            self.build()

    def build(self) -> None:
        self.large = nn.Linear(6, LARGE)
        self.odd = nn.Sequential(nn.Linear(LARGE, 7), nn.LayerNorm(7), nn.BatchNorm1d(7))
        self.first = nn.Linear(7, 3, bias=False)
        self.second = nn.Linear(7, 3)
        self.second.weight = self.first.weight
        self.embedding = nn.Embedding(5, 7)
        self.single = nn.Linear(7, 1)

    def configure_model(self):
        if self.where == "configured" and not hasattr(self, "large"):
            with torch.device("meta"):
                self.build()

    def loss(self, batch):
        x, y = batch
        hidden = self.odd(self.large(x)) + self.embedding(y)
        return nn.functional.cross_entropy(self.first(hidden) + self.second(hidden), y) + self.single(hidden).mean()


def build(where: str, seed: int, plan: str) -> dict[str, Any]:
    """Set a `Sizes` up on this rank, train no step; what its parameters are and which large tensors are alive."""
    torch.manual_seed(seed)
    gc.collect()
    before = {id(tensor) for tensor in _large_tensors()}
    strategy = make_strategy(MESH, {"plan": plan, "leave_sharded": True})
    trainer = make_trainer(strategy, 2, max_steps=0)
    with trainer.init_module(empty_init=True) if where == "init_module" else contextlib.nullcontext():
        module = Sizes("memory" if where == "init_module" else where)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    gc.collect()
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return {
        "tied": module.first.weight is module.second.weight,
        "local": {name: tuple(p.to_local().shape) for name, p in module.named_parameters()},
        "storage": {name: p.to_local().untyped_storage().nbytes() for name, p in module.named_parameters()},
        "large": [tuple(tensor.shape) for tensor in _large_tensors() if id(tensor) not in before],
        "parameters": {name: full(parameter) for name, parameter in module.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
    }


def _large_tensors() -> list[torch.Tensor]:
    """Plain tensors in memory with as many elements as the large layer has."""
    found = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    return [tensor for tensor in found if not tensor.is_meta and tensor.numel() >= 6 * LARGE]


def expected_parameters(seed: int) -> Sizes:
    torch.manual_seed(seed)
    return Sizes("memory")


@pytest.mark.parametrize("where", ["memory", "configured", "init_module"])
def test_weights_are_those_of_one_device(where, worlds: Worlds) -> None:
    expected = expected_parameters(3)
    for rank, result in enumerate(worlds(2).run(build, where, 3, "fsdp")):
        assert result["tied"]
        assert list(result["parameters"]) == [name for name, _ in expected.named_parameters()]
        torch.testing.assert_close(result["parameters"], dict(expected.named_parameters()), rtol=0, atol=0)
        torch.testing.assert_close(result["buffers"], dict(expected.named_buffers()), rtol=0, atol=0)
        for name, parameter in expected.named_parameters():
            rows = [len(part) for part in torch.arange(len(parameter)).chunk(2)] + [0]
            assert result["local"][name] == (rows[rank], *parameter.shape[1:]), name
            assert result["storage"][name] == rows[rank] * parameter[0].numel() * 4, name
        assert result["large"] == []


def test_replicated_weights(worlds: Worlds) -> None:
    expected = expected_parameters(4)
    for result in worlds(2).run(build, "configured", 4, "ddp"):
        torch.testing.assert_close(result["parameters"], dict(expected.named_parameters()), rtol=0, atol=0)
        assert result["local"]["large.weight"] == (LARGE, 6)


def build_with_own_seed(where: str) -> dict[str, Any]:
    """Every rank seeds differently: rank 0's weights count."""
    return build(where, 10 + torch.distributed.get_rank(), "fsdp")


@pytest.mark.parametrize("where", ["memory", "configured"])
def test_rank_zero_decides(where, worlds: Worlds) -> None:
    expected = expected_parameters(10)
    for result in worlds(2).run(build_with_own_seed, where):
        torch.testing.assert_close(result["parameters"], dict(expected.named_parameters()), rtol=0, atol=0)
