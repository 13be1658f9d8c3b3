"""Gradients that parameters get past autograd are those that it would have given them, and nobody misses any."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel import parallelize
from lightning_autoparallel.compile import leaf_gradients
from tests.distributed.test_parallelize import Loss, _mine, data, made
from tests.numerics.training import full
from tests.support.worlds import Worlds

PLANS = {"fsdp": {"dp_shard": 2}, "ddp": {"dp_replicate": 2}}


def begun(plan: str) -> tuple[nn.Module, Tensor]:
    """A module in shards and its loss."""
    module, batch = made(Loss), data()
    parallel = parallelize(module, batch, PLANS[plan], plan=plan, compile=False)
    return module, parallel(*_mine(*batch))


def expected() -> dict[str, Tensor]:
    """The gradients on one device."""
    module = made(Loss)
    module(*data()).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def found(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient that is there, whole, after a look at how its parts lie."""
    there = {name: p for name, p in module.named_parameters() if p.grad is not None}
    for parameter in there.values():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.to_local().stride() == parameter.to_local().stride()
        assert parameter.grad.is_leaf and not parameter.grad.requires_grad
    return {name: full(p.grad) for name, p in there.items()}


def same(ours: dict[str, Tensor], times: float = 1.0, names: Any = None) -> None:
    """Whether these are the gradients on one device, some times, of ``names`` or all."""
    wanted = {name: g * times for name, g in expected().items() if names is None or name in names}
    torch.testing.assert_close(ours, wanted)


def given_directly(plan: str) -> int:
    """How many gradients of a backward did not come by autograd; they are right, and so is their sum with others."""
    left = []

    def watched(*args: Any) -> Any:
        left.append(leaf_gradients_before(*args))
        return left[-1]

    leaf_gradients_before = leaf_gradients.give_to_leaves
    with mock.patch("lightning_autoparallel.compile.step_runner.give_to_leaves", watched):
        module, loss = begun(plan)
        loss.backward(retain_graph=True)
        same(found(module))
        loss.backward()  # adds up
        same(found(module), 2.0)
    assert sum(g is not None for g in left[1]) == 4
    return sum(g is None for g in left[0][:4])


def told_to_hooks(plan: str) -> None:
    """Hooks of one parameter are called with its gradient, and may change it."""
    module, loss = begun(plan)
    seen: list[Any] = []
    module.net[0].weight.register_hook(lambda gradient: seen.append(full(gradient)) or gradient * 2)
    module.net[2].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(full(parameter.grad)))
    loss.backward()
    ours, one = found(module), expected()
    ours["net.0.weight"] /= 2
    same(ours)
    assert len(seen) == 2
    for name in ("net.0.weight", "net.2.bias"):
        assert any(g.shape == one[name].shape and torch.allclose(g, one[name], atol=1e-6) for g in seen)


def asked_for(plan: str) -> None:
    """``autograd.grad`` and ``inputs`` give what was asked for, and leave the rest alone."""
    module, loss = begun(plan)
    names = ["net.0.bias", "net.2.weight"]
    asked = [module.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(loss, asked, retain_graph=True)
    assert found(module) == {}
    same({name: full(gradient) for name, gradient in zip(names, gradients, strict=True)}, names=names)
    loss.backward(inputs=asked)
    same(found(module), names=names)


def more_than_one_path(plan: str) -> None:
    """What a parameter is used for besides adds to its gradient."""
    module, loss = begun(plan)
    (loss + 0.5 * module.net[0].weight.square().sum().full_tensor()).backward()
    ours = found(module)
    ours["net.0.weight"] = ours["net.0.weight"] - made(Loss).net[0].weight
    same(ours)


def kept_zeros(plan: str) -> None:
    """Gradients that are set to zero, not None, are written into."""
    module, loss = begun(plan)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.grad for parameter in module.parameters()]
    loss.backward()
    assert all(p.grad is g for p, g in zip(module.parameters(), before, strict=True))
    same(found(module))


def frozen_meanwhile(plan: str) -> None:
    """What needs no gradient any more gets none."""
    module, loss = begun(plan)
    module.net[0].weight.requires_grad_(False)
    loss.backward()
    same(found(module), names=["net.0.bias", "net.2.weight", "net.2.bias"])


def other_dtype(plan: str) -> None:
    """Autograd casts gradients to the dtype that a parameter's are to have."""
    module, loss = begun(plan)
    module.net[0].weight.grad_dtype = torch.float64
    loss.backward()
    assert module.net[0].weight.grad.dtype == torch.float64
    module.net[0].weight.grad_dtype = None
    module.net[0].weight.grad = module.net[0].weight.grad.float()
    same(found(module))


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_get_all_of_them_directly(plan: str, worlds: Worlds):
    assert worlds(2).run(given_directly, plan) == [4, 4]


HAS_DTYPES = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch's gradients have one dtype here")
CHECKS = [told_to_hooks, asked_for, more_than_one_path, kept_zeros, frozen_meanwhile]
CHECKS.append(pytest.param(other_dtype, marks=HAS_DTYPES))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("plan", PLANS)
def test_nobody_misses_any(check: Any, plan: str, worlds: Worlds):
    worlds(2).run(check, plan)
