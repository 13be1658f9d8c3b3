"""Functions whose backward computes with modules again and differentiates by the parameters that they were given, as
adjoint methods of differential equations do (Chen et al. 2018, "Neural Ordinary Differential Equations").
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.jobs import MESH, ByHand, Net, train
from tests.support.worlds import Worlds


class Adjoint(torch.autograd.Function):
    """Of ``net``, whose parameters follow it; what is not used counts as zero, so nothing may be left out unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.net = net
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return net(x)

    @classmethod
    def asked(cls, ctx: Any, saved: list[Tensor]) -> list[Tensor]:
        return saved

    @classmethod
    def times(cls, x: Tensor) -> int:
        return 1

    @classmethod
    def again(cls, ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        found = []
        for _ in range(cls.times(x)):
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                made = ctx.net(given)
            asked = (given, *cls.asked(ctx, saved))
            found.append(torch.autograd.grad(made, asked, gradient, allow_unused=True, retain_graph=True))
        sums = [None if parts[0] is None else sum(parts) / len(parts) for parts in zip(*found, strict=True)]
        return sums[0], None, *[torch.zeros_like(p) if g is None else g for p, g in zip(saved, sums[1:], strict=True)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return Adjoint.again(ctx, gradient)


class ByModule(Adjoint):
    """Asks for gradients of the module's parameters, not of what it was given."""

    @classmethod
    def asked(cls, ctx: Any, saved: list[Tensor]) -> list[Tensor]:
        return list(ctx.net.parameters())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ByModule.again(ctx, gradient)


class AsOftenAsNeeded(Adjoint):
    """Ranks take different numbers of evaluations."""

    @classmethod
    def times(cls, x: Tensor) -> int:
        return 1 + int(x.sum() * 1000) % 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return AsOftenAsNeeded.again(ctx, gradient)


class Reversible(Adjoint):
    """Lets autograd add up gradients in the backward itself."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            torch.autograd.backward(ctx.net(given), gradient)
        return given.grad, None, *[None] * len(saved)


class OfAModule(Net):
    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp", "capture": "forward"}
    function: ClassVar[type[Adjoint]] = Adjoint

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for _ in range(2):
            x = x + self.function.apply(x, self.field, *self.field.parameters())
        return super().loss((x + self.field(x), batch[1]))


class Copies(OfAModule):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp", "capture": "forward"}


class AskingTheModule(OfAModule):
    function = ByModule


class Adaptive(OfAModule):
    function = AsOftenAsNeeded


class AddingUp(OfAModule):
    function = Reversible


class Hooked(OfAModule):
    """The function, too, is given what hooks make of gradients, and then they are given what it returns."""

    def on_fit_start(self) -> None:
        self.field[0].weight.register_hook(lambda gradient: gradient * 3)


class HookedAddingUp(Hooked):
    function = Reversible


class OfAModuleByHand(ByHand, OfAModule):
    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}


@pytest.mark.parametrize(
    "kind", [OfAModule, Copies, AskingTheModule, Adaptive, AddingUp, Hooked, HookedAddingUp, OfAModuleByHand]
)
def test_they_train_as_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)
