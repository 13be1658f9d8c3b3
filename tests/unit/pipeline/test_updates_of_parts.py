"""Torch's optimizers update parts as plain tensors: the same bits, and nobody but they see it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.updates_of_parts import updates_of_parts
from lightning_autoparallel.torch_compat.dtensors import part_of
from tests.distributed.jobs import Net, train
from tests.support.worlds import Worlds

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1}),
    "Adam": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "Adamax": ("Adamax", {}),
    "AdamW": ("AdamW", {}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, all at once": ("AdamW", {"foreach": True}),
    "AdamW, a rate that is a tensor": ("AdamW", {"lr": torch.tensor(0.1)}),
    "ASGD": ("ASGD", {}),
    "NAdam": ("NAdam", {"momentum_decay": 0.1}),
    "RAdam": ("RAdam", {"weight_decay": 0.1}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.fixture
def mesh(fake_mesh: Callable[..., ParallelMesh]) -> DeviceMesh:
    """Of a world of two."""
    fake_mesh(dp_shard=2)
    return init_device_mesh("cpu", (2,))


def shards(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a vector, one row of which this rank has all, a number, and what has no gradient."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, placement in [
        ((6, 5), Shard(0)),
        ((7,), Shard(0)),
        ((1, 3), Shard(0)),
        ((), Replicate()),
        ((4,), Shard(0)),
    ]:
        value, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
        parameter = nn.Parameter(DTensor.from_local(value, mesh, [placement], run_check=False))
        parameter.grad = DTensor.from_local(gradient, mesh, [placement], run_check=False)
        made.append(parameter)
    made[-1].grad = None
    return made


def described(value: Any) -> Any:
    """What a value is, and its bits."""
    if isinstance(value, DTensor):
        return "shard", value.placements, value.shape, value.stride(), value.dtype, value.to_local().tolist()
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


def everything(optimizer: torch.optim.Optimizer) -> Any:
    """Parameters, gradients, state in its order, and groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [[(name, described(v)) for name, v in state.items()] for state in optimizer.state.values()]
    groups = [{n: described(v) for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    return [[described(p), described(p.grad)] for p in parameters], kept, groups, len(optimizer.state_dict()["state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_the_same(name: str, dtype: torch.dtype, mesh: DeviceMesh):
    kind, options = OPTIMIZERS[name]
    found = []
    for of_parts in (False, True):
        parameters = shards(mesh, dtype)
        optimizer = getattr(torch.optim, kind)(parameters, **copy.deepcopy(options))
        for _ in range(4):
            if of_parts:
                with updates_of_parts(optimizer):
                    held = optimizer.param_groups[0]["params"]
                    assert [isinstance(p, DTensor) for p in held] == [False] * 4 + [True]
                    optimizer.step()
            else:
                optimizer.step()
            assert all(p is own for p, own in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        found.append(everything(optimizer))
    assert found[0] == found[1]


def test_state_that_was_loaded_or_replaced_is_gone_on_with(mesh: DeviceMesh):
    found = []
    for of_parts in (False, True):
        optimizer = torch.optim.AdamW(shards(mesh), lr=0.1)
        optimizer.step()
        other = torch.optim.AdamW(shards(mesh), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        with updates_of_parts(other) if of_parts else contextlib.nullcontext():
            other.step()
        first = other.param_groups[0]["params"][0]
        other.state[first]["exp_avg"] = torch.zeros_like(first)
        with updates_of_parts(other) if of_parts else contextlib.nullcontext():
            other.step()
        found.append(everything(other))
    assert found[0] == found[1]


def test_what_was_saved_for_a_backward_is_known_to_have_changed(mesh: DeviceMesh):
    parameters = shards(mesh)
    loss = (parameters[0] * parameters[0]).sum().to_local()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with updates_of_parts(optimizer):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_all_is_as_before_after_an_error(mesh: DeviceMesh):
    parameters = shards(mesh)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    before, state = everything(optimizer), optimizer.state
    with pytest.raises(KeyError), updates_of_parts(optimizer):
        raise KeyError
    assert everything(optimizer) == before
    assert optimizer.state is state
    assert all(part_of(p).grad is None for p in parameters)


class Mine(torch.optim.AdamW):
    """Who knows what its step does."""


def _told_before(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _told_after(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    return optimizer


def _other_gradients(shards: list[nn.Parameter]) -> list[nn.Parameter]:
    for shard in shards[:-1]:
        shard.grad = shard.grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr]
    return shards


def _other_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    first = optimizer.param_groups[0]["params"][0]
    whole = DTensor.from_local(torch.zeros(first.shape), first.device_mesh, [Replicate()], run_check=False)
    optimizer.state[first] = {"step": torch.tensor(1.0), "exp_avg": whole, "exp_avg_sq": torch.zeros_like(first)}
    return optimizer


REFUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "differentiable": lambda shards: torch.optim.SGD(shards, lr=0.1, differentiable=True),
    "somebody waits for its steps": lambda shards: _told_after(torch.optim.AdamW(shards)),
    "somebody comes before its steps": lambda shards: _told_before(torch.optim.AdamW(shards)),
    "its step is another's": lambda shards: _replaced(torch.optim.AdamW(shards)),
    "a kind of its own": Mine,
    "not element by element": torch.optim.Adafactor,
    "a plain tensor beside": lambda shards: torch.optim.AdamW([*shards, _plain()]),
    "gradients that are cut otherwise": lambda shards: torch.optim.AdamW(_other_gradients(shards)),
    "state that is cut otherwise": lambda shards: _other_state(torch.optim.AdamW(shards)),
}


def _plain() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_alone(case: str, mesh: DeviceMesh):
    optimizer = REFUSED[case](shards(mesh))
    held, state = list(optimizer.param_groups[0]["params"]), optimizer.state
    with updates_of_parts(optimizer):
        assert all(p is own for p, own in zip(optimizer.param_groups[0]["params"], held, strict=True))
        assert optimizer.state is state


def test_a_scheduler_does_not_keep_parts_away(mesh: DeviceMesh):
    optimizer = torch.optim.AdamW(shards(mesh))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with updates_of_parts(optimizer):
        assert not isinstance(optimizer.param_groups[0]["params"][0], DTensor)


class Watched(Net):
    """Two optimizers, the hook of one of which steps the other; notes whether groups hold shards where a user looks."""

    automatic_optimization = False

    def configure_optimizers(self):
        self.seen: list[bool] = []
        half = len(list(self.parameters())) // 2
        parts = list(self.parameters())[:half], list(self.parameters())[half:]
        return [torch.optim.AdamW(part, lr=0.05) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(self._is_sharded(optimizer))
        first, second = self.optimizers()
        if optimizer is first.optimizer:
            second.step()
            second.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [self._is_sharded(optimizer.optimizer) for optimizer in self.optimizers()]

    def extra(self) -> Any:
        return self.seen

    def _is_sharded(self, optimizer: torch.optim.Optimizer) -> bool:
        tensors = [*optimizer.param_groups[0]["params"], *optimizer.state]
        return all(isinstance(tensor, DTensor) for tensor in tensors)


def plain_updates(kind: type[Net]) -> Any:
    """How many updates of a training were of plain tensors alone, and of any, and what the module has seen."""
    adamw = sys.modules["torch.optim.adam"]
    with mock.patch.object(adamw, "_multi_tensor_adam", wraps=adamw._multi_tensor_adam) as taken:
        outcome = train(kind, {"dp_shard": 2})
    plain = [not any(isinstance(p, DTensor) for p in call.args[0]) for call in taken.call_args_list]
    return all(plain), len(plain), outcome.extra


def test_a_trainer_updates_parts_and_users_see_shards(worlds: Worlds):
    expected = True, 2 * Watched.steps, [True] * 4 * Watched.steps
    assert worlds(2).run(plain_updates, Watched) == [expected] * 2
