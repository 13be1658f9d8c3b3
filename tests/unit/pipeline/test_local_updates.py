"""Updates of parts as plain tensors: the bits of the optimizer on DTensors, which is all that anybody else sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from lightning_autoparallel.pipeline.local_updates import local_updates

Made = tuple[list[nn.Parameter], torch.optim.Optimizer]
OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], Mapping[str, Any]], ...] = (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {}),
)


@pytest.fixture
def mesh(fake_mesh: Callable[..., Any]) -> Any:
    return fake_mesh(dp_shard=2).device_mesh


def around(local: Tensor, mesh: Any, placement: Any = None) -> DTensor:
    return DTensor.from_local(local, mesh, (placement or Shard(0),), run_check=False)


def made(mesh: Any, kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> Made:
    """Parameters in shards, one without a gradient and one on this rank only."""
    draws = torch.Generator().manual_seed(1)
    parts = [torch.randn(3, 4, generator=draws), torch.randn(5, generator=draws), torch.randn(2, generator=draws)]
    parameters = [nn.Parameter(around(part, mesh)) for part in parts]
    if not settings.keys() & {"fused", "foreach"}:  # by which torch takes no plain tensors beside DTensors
        parameters.append(nn.Parameter(torch.randn(2, 2, generator=draws)))
    return parameters, kind(parameters, **settings)  # type: ignore[call-arg]


def give_gradients(parameters: list[nn.Parameter], mesh: Any, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for parameter in (*parameters[:2], *parameters[3:]):
        local = torch.randn(local_of(parameter).shape, generator=draws)
        parameter.grad = around(local, mesh) if isinstance(parameter, DTensor) else local


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    alike = type(one) is type(other) and one.shape == other.shape and local_of(one).equal(local_of(other))
    return alike and (not isinstance(one, DTensor) or one.placements == other.placements)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=lambda each: each.__name__ if callable(each) else "")
def test_they_are_those_of_dtensors(mesh: Any, kind: Any, settings: Mapping[str, Any]) -> None:
    (ours, optimizer), (theirs, expected) = made(mesh, kind, settings), made(mesh, kind, settings)
    state, seen = optimizer.state, []
    for seed in range(3):
        for parameters in (ours, theirs):
            give_gradients(parameters, mesh, seed)
        with local_updates(optimizer) as swap:
            swap()
            seen.append(type(optimizer.param_groups[0]["params"][0]))
            optimizer.step()
        expected.step()
        assert optimizer.state is state
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], ours, strict=True))
        for one, other in zip(ours, theirs, strict=True):
            assert same(one, other)
            assert optimizer.state[one].keys() == expected.state[other].keys()
            assert all(same(value, expected.state[other][name]) for name, value in optimizer.state[one].items())
    assert seen == [Tensor] * 3


def test_hooks_of_steps_see_dtensors(mesh: Any) -> None:
    parameters, optimizer = made(mesh, torch.optim.AdamW, {})
    seen: list[bool] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first = optimizer.param_groups[0]["params"][0]
        seen.append(first is parameters[0] and isinstance(optimizer.state[first]["exp_avg"], DTensor))

    optimizer.register_step_post_hook(look)
    give_gradients(parameters, mesh, 0)
    with local_updates(optimizer) as swap:
        swap()
        optimizer.step()
    assert seen == [True]
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_an_update_that_fails_leaves_dtensors(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, optimizer = made(mesh, torch.optim.AdamW, {})
    give_gradients(parameters, mesh, 0)
    monkeypatch.setattr(optimizer, "_init_group", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), local_updates(optimizer) as swap:
        swap()
        optimizer.step()
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert not optimizer._optimizer_step_post_hooks


def gradient_of_addends(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    parameters[1].grad = around(torch.randn(10), mesh, Partial())


def state_that_is_whole(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    optimizer.state[parameters[1]]["exp_avg"] = around(torch.zeros(10), mesh, Replicate())


def state_that_is_plain(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    optimizer.state[parameters[1]]["exp_avg"] = torch.zeros(5)


def a_number(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(around(torch.zeros(()), mesh, Replicate()))]})


def differentiable(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    optimizer.param_groups[0]["differentiable"] = True


@pytest.mark.parametrize(
    "change", [gradient_of_addends, state_that_is_whole, state_that_is_plain, a_number, differentiable]
)
def test_what_does_not_lie_together_stays_as_it_is(mesh: Any, change: Callable[..., None]) -> None:
    parameters, optimizer = made(mesh, torch.optim.AdamW, {})
    give_gradients(parameters, mesh, 0)
    optimizer.step()
    change(parameters, optimizer, mesh)
    before = copy.copy(optimizer.param_groups[0]["params"])
    with local_updates(optimizer) as swap:
        swap()
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], before, strict=True))
