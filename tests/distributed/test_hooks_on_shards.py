"""Hooks of gradients and of optimizers' steps give what they give on one device, written as users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.torch_compat.autograd import gradients_held, hooks_replaced
from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds

MASK = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0]])


def _by_mask(gradient: Tensor) -> Tensor:
    return gradient * MASK


def _by_item(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:2] = 0
    return gradient


def _by_rows(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:2].zero_()
    gradient[4] *= 0.5
    return gradient


def _by_data(gradient: Tensor) -> None:
    gradient.data[:2].mul_(0)


def _by_view(gradient: Tensor) -> None:
    gradient.view(-1)[:7].zero_()


def _by_norm(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1)


def _by_product(gradient: Tensor) -> Tensor:
    return (torch.eye(5) * 0.5) @ gradient


def _by_plain(gradient: Tensor) -> Tensor:
    return torch.full((5, 5), 0.01)


HOOKS: list[Callable[[Tensor], Tensor | None]] = [
    *(_by_mask, _by_item, _by_rows, _by_data, _by_view, _by_norm, _by_product, _by_plain)
]


class Hooked(Net):
    """A layer for each hook, of rows that two ranks cannot share evenly; hooks are hung on before placing."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(6, 5), nn.ModuleList(nn.Linear(5, 5) for _ in HOOKS)
        for layer, hook in zip(self.net, HOOKS, strict=True):
            layer.weight.register_hook(hook)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.first(x)
        for layer in self.net:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(x, y)


class Forward(Hooked):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "forward"}


class Copies(Hooked):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class Plainly(Hooked):
    """``loss.backward()`` in a step of its own, twice; weights are read by the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch) + sum(layer.weight.square().sum() for layer in self.net)
        (loss / 2).backward(retain_graph=True)
        loss.backward()
        optimizer.step()


class Afterwards(Hooked):
    """Of accumulated gradients, hung on when parameters lie in shards; it is taken down in the third step."""

    def on_fit_start(self) -> None:
        def after(parameter: Tensor) -> None:
            parameter.grad[1].zero_()
            parameter.grad.mul_(MASK + 1)
            self.seen += 1
            if self.seen == 3:
                handle.remove()

        self.seen = 0
        handle = self.net[0].weight.register_post_accumulate_grad_hook(after)

    def extra(self) -> int:
        return self.seen


class InBackward(Forward):
    """Each parameter is updated as its gradient comes, which goes at once: no other is there, nor zeros for it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.there = False, 0
        for parameter in self.parameters():
            parameter.register_hook(partial(self.before, parameter))
            parameter.register_post_accumulate_grad_hook(self.after)

    def before(self, parameter: Tensor, gradient: Tensor) -> None:
        self.there += parameter.grad is not None

    @torch.no_grad()
    def after(self, parameter: Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()

    def extra(self) -> int:
        return self.there


class AfterSteps(Net):
    """What is hung on an optimizer: constraints of weights before and behind its step, a mean in plain tensors."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
        self.register_buffer("mean", torch.zeros(5, 5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        return optimizer

    @torch.no_grad()
    def before(self, *_: Any) -> None:
        self.net[2].bias[1:3].zero_()
        self.net[2].bias.mul_(torch.arange(5.0))

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        self.net[0].weight.mul_(MASK)
        self.net[2].weight[0] = 0
        self.net[2].weight[3].zero_()
        self.net[0].weight.data[2:].mul_(0.9)
        self.mean.lerp_(self.net[2].weight.detach(), 0.1)


class Replaced(AfterSteps):
    """The same in a function in the step's place, as wrappers of optimizers put it there."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
        step = optimizer.step

        def replaced(closure: Any = None) -> Any:
            loss = step(closure)
            self.after()
            return loss

        optimizer.step = replaced
        return optimizer


KINDS = [Hooked, Forward, Copies, Plainly, Afterwards, InBackward, AfterSteps, Replaced]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hooks_give_what_they_give_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    alone, ranks = train(kind, None), worlds(2).run(train, kind, MESH, 2)
    for rank in ranks:  # losses are those of a rank's own rows where steps run in Python
        torch.testing.assert_close(rank.parameters, alone.parameters, rtol=1e-5, atol=1e-6)
        assert rank.extra == alone.extra


class Bare(Hooked):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer.weight._backward_hooks.clear()


def test_the_hooks_change_what_is_trained() -> None:
    hooked, bare = train(Hooked, None).parameters, train(Bare, None).parameters
    for i in range(len(HOOKS)):
        name = f"net.{i}.weight"
        assert not torch.allclose(hooked[name], bare[name], atol=1e-4), HOOKS[i].__name__


class OnlyFirst(Hooked):
    """Rank 0 alone looks at a row of a gradient, which all ranks hold parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(self.look)

    def look(self, gradient: Tensor) -> None:
        if self.trainer.is_global_zero:
            self.row = gradient[0].clone()


class OnlyFirstInForward(OnlyFirst):
    strategy: ClassVar[Mapping[str, Any]] = Forward.strategy


def fit_in_vain(kind: type[Net]) -> str:
    try:
        train(kind, MESH)
    except AutoParallelError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("kind", [OnlyFirst, OnlyFirstInForward], ids=lambda kind: kind.__name__)
def test_a_hook_in_which_one_rank_needs_the_others_is_an_error(kind: type[Net], worlds: Worlds) -> None:
    told = worlds(2).run(fit_in_vain, kind)
    assert all("in a hook" in each or "where a hook" in each for each in told) and "select" in told[0], told


def test_hooks_that_are_taken_down_while_gradients_are_held_stay_down() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    handles = [parameter.register_hook(lambda gradient, i=i: calls.append(i)) for i in range(3)]  # type: ignore[misc]
    with gradients_held([parameter]) as held:
        (parameter * 3).sum().backward()
        handles[1].remove()
        parameter.register_hook(lambda gradient: calls.append("new"))
    assert calls == [] and not parameter.grad.any()
    (parameter * 1).sum().backward()
    assert calls == [0, 2, "new"]
    torch.testing.assert_close(held[id(parameter)], [torch.full((2,), 3.0)])


def test_what_hooks_hang_up_and_take_down_stays_so() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(first := partial(lambda calls, gradient: calls.append("first"), calls))
    second = parameter.register_hook(lambda gradient: second.remove())

    def told(hook: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any) -> Any:
            calls.append("around")
            return hook(*args)

        return around

    with hooks_replaced([parameter], told), hooks_replaced([parameter], told):
        parameter.register_hook(lambda gradient: calls.append("third"))
        parameter.sum().backward()
    assert calls == ["around", "first", "around", "third"]
    assert len(parameter._backward_hooks) == 2 and first in parameter._backward_hooks.values()
