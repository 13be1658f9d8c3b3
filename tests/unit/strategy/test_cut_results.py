"""Which gradients what a module computed outside of steps has, and what it keeps alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline.owed_gradients import OwedGradients
from lightning_autoparallel.strategy.outside_gradients import OutsideGradients
from lightning_autoparallel.torch_compat.interception import without_transforms

X = torch.arange(4.0)


class Calls:
    """Calls of a module of one parameter, (3, 4) in rows."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter, self.gradients = parameter, OutsideGradients()
        self.owed = OwedGradients(None, None, None)  # type: ignore[arg-type]
        self.wholes: list[weakref.ref[Tensor]] = []

    def __call__(self, compute: Callable[[Tensor], Any], *given: Any) -> Any:
        def run() -> Any:
            with without_transforms():
                leaf = self.owed.leaf(self.parameter, torch.ones(3, 4))
            self.wholes.append(weakref.ref(leaf))
            return compute(leaf)

        return self.gradients.called(run, given, self.owed, "model.py:5")

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        self.gradients.check_asked(torch.autograd.grad, args, kwargs)
        return torch.autograd.grad(*args, **kwargs)

    @property
    def alive(self) -> int:
        return sum(whole() is not None for whole in self.wholes)


@pytest.fixture
def calls(fake_mesh) -> Calls:
    mesh = fake_mesh(dp_shard=2).submesh(("dp_shard",))
    return Calls(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]).requires_grad_())


def test_results_say_what_has_a_gradient_and_keep_nothing(calls: Calls) -> None:
    kept, mask, twice = calls(lambda whole: (whole @ X, whole.detach() > 0, {"of": [whole.exp()]}), X)
    assert kept.requires_grad and not mask.requires_grad and twice["of"][0].requires_grad
    assert kept.tolist() == [6.0, 6.0, 6.0] and calls.alive == 0
    same = calls(lambda whole: [whole.sum()] * 2, X)
    assert same[0] is same[1]


def test_gradients_of_parameters_are_refused_with_the_line_of_the_call(calls: Calls) -> None:
    results = [calls(lambda whole: whole.sum(), X), calls(lambda whole: (whole * X).sum(), X.clone().requires_grad_())]
    for result in results:
        with pytest.raises(CaptureError, match=r"^model.py:5 calls a module outside of a step"):
            (result * 2 + torch.ones((), requires_grad=True)).backward(retain_graph=True)
        with pytest.raises(CaptureError, match=r"^model.py:5"):
            calls.grad(result, [calls.parameter], allow_unused=True)
        with pytest.raises(CaptureError, match=r"^model.py:5"):
            calls.gradients.check_asked(Tensor.backward, (result,), {"inputs": [calls.parameter]})
        with pytest.raises(CaptureError, match=r"^model.py:5"):
            calls.gradients.check_asked(torch.autograd.backward, ([result],), {"inputs": calls.parameter})


def test_gradients_of_inputs_are_there(calls: Calls) -> None:
    x = X.clone().requires_grad_()
    result = calls(lambda whole: (whole * x).sum(0), x)
    (slope,) = calls.grad(result, x, torch.ones(4), retain_graph=True)
    assert slope.tolist() == [3.0] * 4
    (rows,) = calls.grad(result, x, torch.eye(4), retain_graph=True, is_grads_batched=True)
    assert rows.tolist() == (torch.eye(4) * 3).tolist()
    with pytest.raises(CaptureError, match=r"^model.py:5"):
        calls.grad(result, [x, calls.parameter], torch.eye(4), is_grads_batched=True)


def test_other_parameters_may_be_asked_for(calls: Calls) -> None:
    result, other = calls(lambda whole: whole.sum(), X), calls.parameter.detach().clone().requires_grad_()
    assert calls.grad(result + torch.ones((), requires_grad=True), [other], allow_unused=True) == (None,)


def test_a_call_may_differentiate_what_it_computes(calls: Calls) -> None:
    def forces(whole: Tensor) -> Tensor:
        x = X.clone().requires_grad_()
        (force,) = torch.autograd.grad((whole * x.square()).sum(), x, create_graph=True)
        (own,) = torch.autograd.grad(whole.square().sum(), whole)
        return force + own.sum()

    result = calls(forces, X)
    assert result.tolist() == (6 * X + 24).tolist() and result.requires_grad and calls.alive == 0


def test_nothing_is_followed_where_gradients_are_off(calls: Calls) -> None:
    with torch.no_grad():
        assert not calls(lambda whole: whole.sum(), X).requires_grad


def test_transforms_are_given_gradients_of_inputs(calls: Calls) -> None:
    slope = torch.func.grad(lambda x: calls(lambda whole: (whole * x).sum(), x))(X)
    assert slope.tolist() == [3.0] * 4
