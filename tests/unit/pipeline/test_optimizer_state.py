"""What optimizers keep, before their first step: as much as they do keep after one, and they are none the wiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_autoparallel.cost.hardware import hardware_from
from lightning_autoparallel.cost.optimizer import ADAMW, ADAMW_MOVES, ADAMW_STATE, update_time_us
from lightning_autoparallel.pipeline.optimizer_state import names_by_id, optimizer_state

MADE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16, bias=False), nn.LayerNorm(16))


def really_kept(module: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Of a real step, as an oracle."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = {}
    for name, parameter in module.named_parameters():
        tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim()]
        found[name] = sum(v.numel() * v.element_size() for v in tensors) / (parameter.numel() * 4)
    return found


@pytest.mark.parametrize("name", MADE)
def test_as_much_as_a_step_makes(name: str) -> None:
    module = net()
    optimizer = MADE[name](module.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a function of its own around the step
    before = [parameter.detach().clone() for parameter in module.parameters()]
    state, unknown = optimizer_state([optimizer], names_by_id(module))
    assert unknown is None
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert {key: state.of(key) for key, _ in module.named_parameters()} == pytest.approx(really_kept(module, optimizer))


def test_frozen_parameters_and_those_of_no_optimizer_have_none() -> None:
    module = net()
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([*module[0].parameters(), *module[1].parameters()])
    state, _ = optimizer_state([optimizer], names_by_id(module))
    assert (state.of("0.weight"), state.of("1.weight"), state.of("2.weight")) == (0.0, 2.0, 0.0)


def test_two_optimizers_add_up() -> None:
    module = net()
    both = [torch.optim.AdamW(module.parameters()), torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)]
    state, _ = optimizer_state(both, names_by_id(module))
    assert (state.of("0.weight"), state.of("1.weight")) == (2.0, 3.0)


class Around(Optimizer):
    """Wraps another one, whose step is its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.Adafactor(p), "a step of Adafactor on tensors without values failed"),
        (lambda p: torch.optim.LBFGS(p), "a step of LBFGS on tensors without values failed"),
        (lambda p: Around(torch.optim.SGD(p, lr=0.1, momentum=0.9)), "the step of Around is not one of torch's own"),
    ],
    ids=["reads values", "needs a closure", "wraps another"],
)
def test_what_cannot_be_known_is_taken_for_adamw_and_says_so(make: Any, why: str) -> None:
    module = net()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    state, unknown = optimizer_state([made := make(module.parameters())], names_by_id(module))
    assert all(state.of(name) == ADAMW_STATE for name in names_by_id(module).values())
    assert unknown is not None and why in unknown
    assert not getattr(made, "inner", made).state
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


class Renamed(torch.optim.SGD):
    """Of another name, and with no step of its own."""


def test_a_step_that_is_inherited_is_known_and_what_is_not_leaves_the_others_known() -> None:
    module = net()
    state, unknown = optimizer_state([Renamed(module.parameters(), lr=0.1)], names_by_id(module))
    assert (state.of("0.weight"), unknown) == (0.0, None)
    first, second = (list(module[i].parameters()) for i in range(2))
    several = [torch.optim.SGD(first, lr=0.1), Around(torch.optim.SGD(second, lr=0.1))]
    state, unknown = optimizer_state(several, names_by_id(module))
    assert (state.of("0.weight"), state.of("1.weight")) == (0.0, ADAMW_STATE)
    assert unknown is not None and "Around" in unknown


def test_hooks_of_all_optimizers_are_not_called() -> None:
    module, called = net(), []
    handle = register_optimizer_step_pre_hook(lambda *given: called.append(given))
    try:
        optimizer_state([torch.optim.AdamW(module.parameters())], names_by_id(module))
    finally:
        handle.remove()
    assert called == []


def test_without_optimizers_adamw_is_meant() -> None:
    assert optimizer_state([], {}) == (ADAMW, None)


def test_an_update_moves_what_is_kept() -> None:
    h100 = hardware_from("h100")
    adamw, sgd = update_time_us(7e6, h100), update_time_us(7e6, h100, 0.0)
    assert ADAMW_MOVES == 3 + 2 * ADAMW_STATE
    assert sgd == pytest.approx(adamw * 3 / ADAMW_MOVES)
