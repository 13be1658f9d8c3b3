"""Code that is given parameters behind torch's functions, in steps that run as they are written: functions with a
backward of their own, regions that a backward runs again, hooks of activations. It computes with whole parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.jobs import MESH, Net, failure, train
from tests.support.worlds import Worlds

IN_C = not isinstance(torch.autograd.Function.__dict__["apply"], classmethod)  # from torch 2.14 on


class Forward(Net):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "forward"}

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6))


class Signs(torch.autograd.Function):
    """Of weights that are trained straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Mixed(torch.autograd.Function):
    """Whose backward needs the parameter again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Momenta(torch.optim.SGD):
    """A user's own, as far as anybody knows."""


class StraightThrough(Forward):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] @ Signs.apply(self.mixing), batch[1]))


class StraightThroughByOwnOptimizer(StraightThrough):
    def configure_optimizers(self) -> Any:
        return Momenta(self.parameters(), lr=0.1, momentum=0.9)


class StraightThroughCopies(StraightThroughByOwnOptimizer):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp", "capture": "forward"}


class OwnProduct(Forward):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((Mixed.apply(batch[0], self.mixing), batch[1]))


class Region(Forward):
    """A method that computes with a parameter, and a function of one."""

    reentrant: ClassVar[bool] = False

    def mixed(self, x: Tensor) -> Tensor:
        return F.linear(x.tanh(), self.net[0].weight.T @ self.net[0].weight) @ self.mixing

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_(self.reentrant)
        scale = checkpoint(torch.exp, self.mixing, use_reentrant=self.reentrant)
        return super().loss((checkpoint(self.mixed, x, use_reentrant=self.reentrant) @ scale, batch[1]))


class ReentrantRegion(Region):
    reentrant = True


class Asks(nn.Module):
    """Is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum().item() < 1e9 else x


class ReentrantModule(Forward):
    """Of a module, which is called in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = Asks()

    def loss(self, batch: Any) -> Tensor:
        x = checkpoint(self.asks, batch[0].requires_grad_(), use_reentrant=True)
        return super().loss((x @ self.mixing, batch[1]))


class Scaled(torch.autograd.Function):
    """Picks what it computes by the function that it is given, and leaves something in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, act: Any, seen: list[int]) -> Tensor:
        assert act is F.silu, "another function"
        seen.append(len(x))
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return None, x.T @ gradient, None, None


scaled = Scaled.apply  # as torch's documentation calls functions


class ByAnotherName(Forward):
    def loss(self, batch: Any) -> Tensor:
        seen: list[int] = []
        found = scaled(batch[0], self.mixing, F.silu, seen)
        assert seen == [len(batch[0])]
        return super().loss((found, batch[1]))


class HookOfActivation(Forward):
    def loss(self, batch: Any) -> Tensor:
        hidden = batch[0] @ self.mixing
        hidden.register_hook(lambda gradient: gradient @ self.mixing.detach())
        return super().loss((hidden, batch[1]))


class HookOfModule(Forward):
    """Of gradients of a module's results, and of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(lambda module, given, _: (given[0] + self.mixing.detach().sum(),))
        self.net[2].register_full_backward_pre_hook(lambda module, made: (made[0] * self.mixing.detach().mean(),))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.mixing.square().mean()


class KeptParametrizations(Forward):
    """Whose values a captured module is not given: they are of the step around it."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[2])

    def loss(self, batch: Any) -> Tensor:
        with nn.utils.parametrize.cached():
            return super().loss((batch[0] @ self.mixing, batch[1])) + self.net[2].weight.square().sum()


@pytest.mark.parametrize(
    "kind",
    [
        StraightThrough,
        StraightThroughByOwnOptimizer,
        StraightThroughCopies,
        OwnProduct,
        pytest.param(ByAnotherName, marks=pytest.mark.skipif(IN_C, reason="apply is all in C: refused, below")),
        Region,
        ReentrantRegion,
        ReentrantModule,
        HookOfActivation,
        HookOfModule,
        KeptParametrizations,
    ],
)
def test_they_train_as_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not IN_C, reason="what apply calls is seen")
def test_functions_by_another_name_are_refused(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, ByAnotherName):
        assert text.startswith("CaptureError") and "gradient of parameter mixing is that of this rank's rows" in text


class BehindAll(Forward):
    """What no function of torch is asked about: the original of what the strategy has put in its place."""

    def loss(self, batch: Any) -> Tensor:
        signs = super(torch.autograd.Function, Signs).apply(self.mixing)
        return super().loss((batch[0] @ signs, batch[1]))


def test_gradients_of_one_ranks_rows_are_refused(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, BehindAll):
        assert text.startswith("CaptureError") and "gradient of parameter mixing is that of this rank's rows" in text
