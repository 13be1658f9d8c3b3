"""Torch's optimizers take all shards at once on CPUs where their user has chosen nothing, with the same bits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline import updates_at_once as module
from lightning_autoparallel.pipeline.updates_at_once import updates_at_once
from tests.distributed.jobs import Net, train
from tests.support.worlds import Worlds

OPTIMIZERS = {
    "Adadelta": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "AdamW": {"maximize": True},
    "RMSprop": {"centered": True, "momentum": 0.9, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


@pytest.fixture
def shards(fake_mesh: Callable[..., ParallelMesh]) -> Callable[[], list[nn.Parameter]]:
    """Makes a few parameters with gradients, some of them tiny, of a world of two; the last one has no gradient."""
    fake_mesh(dp_shard=2)
    mesh = init_device_mesh("cpu", (2,))

    def make() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for i in range(5):
            value, gradient = (torch.randn(7, 9 + i, generator=generator) for _ in range(2))
            parameter = nn.Parameter(DTensor.from_local(value, mesh, [Shard(0)]))
            parameter.grad = None if i == 4 else DTensor.from_local(gradient * 10.0 ** (-3 * i), mesh, [Shard(0)])
            made.append(parameter)
        return made

    return make


def local(values: Any) -> list[Tensor]:
    return [value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value) for value in values]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_the_same(name: str, shards: Callable[[], list[nn.Parameter]]):
    results = []
    for at_once in (False, True):
        parameters = shards()
        optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])
        for _ in range(5):
            if at_once:
                with updates_at_once(optimizer):
                    assert optimizer.param_groups[0]["foreach"] is True
                    optimizer.step()
            else:
                optimizer.step()
            assert optimizer.param_groups[0]["foreach"] is None
        state = [value for parameter in parameters[:-1] for value in optimizer.state[parameter].values()]
        results.append(local([*parameters, *(parameter.grad for parameter in parameters[:-1]), *state]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Mine(torch.optim.AdamW):
    """Who knows what its step does."""


REFUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "one by one was asked for": lambda shards: torch.optim.AdamW(shards, foreach=False),
    "fused": lambda shards: torch.optim.AdamW(shards, fused=True),
    "differentiable": lambda shards: torch.optim.SGD(shards, lr=0.1, differentiable=True),
    "a rate that is a tensor": lambda shards: torch.optim.AdamW(shards, lr=torch.tensor(0.1), foreach=None),
    "writes into gradients": lambda shards: torch.optim.SGD(shards, lr=0.1, momentum=0.9, nesterov=True),
    "16 bits": lambda shards: torch.optim.SGD(_narrow(shards), lr=0.1, momentum=0.9),
    "somebody waits for its steps": lambda shards: _told(torch.optim.AdamW(shards)),
    "rounds otherwise": lambda shards: torch.optim.NAdam(shards),
    "a kind of its own": Mine,
    "a plain tensor beside": lambda shards: torch.optim.AdamW([*shards, _plain()]),
}


def _narrow(shards: list[nn.Parameter]) -> list[nn.Parameter]:
    narrow = [nn.Parameter(shard.detach().bfloat16()) for shard in shards]
    for parameter in narrow:
        parameter.grad = torch.ones_like(parameter)
    return narrow


def _told(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _plain() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_alone(case: str, shards: Callable[[], list[nn.Parameter]]):
    optimizer = REFUSED[case](shards())
    before = dict(optimizer.param_groups[0])
    with updates_at_once(optimizer):
        assert optimizer.param_groups[0] == before
    assert optimizer.param_groups[0] == before


def test_much_memory_is_not_doubled(shards: Callable[[], list[nn.Parameter]], monkeypatch: pytest.MonkeyPatch):
    optimizer = torch.optim.AdamW(shards())
    monkeypatch.setattr(module, "_MOST_BYTES", 4 * 7 * (9 + 10 + 11 + 12) - 1)
    with updates_at_once(optimizer):
        assert optimizer.param_groups[0]["foreach"] is None
    monkeypatch.setattr(module, "_MOST_BYTES", 4 * 7 * (9 + 10 + 11 + 12))
    with updates_at_once(optimizer):
        assert optimizer.param_groups[0]["foreach"] is True


def test_a_group_is_as_before_after_an_error(shards: Callable[[], list[nn.Parameter]]):
    optimizer = torch.optim.AdamW(shards())
    with pytest.raises(KeyError), updates_at_once(optimizer):
        raise KeyError
    assert optimizer.param_groups[0]["foreach"] is None


class Watched(Net):
    """Notes how its optimizer has updated."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def extra(self) -> Any:
        return self.optimizers().param_groups[0]["foreach"]


def calls_at_once(kind: type[Net]) -> tuple[int, Any]:
    """How often AdamW took all parameters at once in a training, and what its group says behind it."""
    adamw = sys.modules["torch.optim.adam"]
    with mock.patch.object(adamw, "_multi_tensor_adam", wraps=adamw._multi_tensor_adam) as taken:
        outcome = train(kind, {"dp_shard": 2})
    return taken.call_count, outcome.extra


def test_a_trainer_steps_so(worlds: Worlds):
    assert worlds(2).run(calls_at_once, Watched) == [(Watched.steps, None)] * 2
