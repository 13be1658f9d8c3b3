"""Gradients of what modules compute outside of steps: those of inputs are one device's, those of parameters refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 1, 2, 1])


class Rehearses(Net):
    """Its own backward adds the loss of a batch that it remembers."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def backward(self, loss, *args, **kwargs):
        (loss + 0.5 * F.cross_entropy(self.net(X), Y)).backward()


class AuxiliaryStep(Rehearses):
    """A loss of its own in a hook, joined with a penalty that lies in shards."""

    def backward(self, loss, *args, **kwargs):
        loss.backward()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.added().backward()

    def added(self) -> Tensor:
        return F.cross_entropy(self.net(X), Y) + 0.01 * sum(p.square().sum() for p in self.net.parameters())


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class SavesNothing(AuxiliaryStep):
    """A sum of results is differentiated without any value."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((self.shift(x), y))

    def added(self) -> Tensor:
        return self.shift(X).sum()


class Asks(AuxiliaryStep):
    def added(self) -> Tensor:
        parameters = list(self.net.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(self.net(X), Y), parameters, **self.options)
        return sum(
            (gradient * p).sum() for gradient, p in zip(gradients, parameters, strict=True) if gradient is not None
        )

    options: ClassVar[Mapping[str, Any]] = {}


class AsksWhatIsUnused(Asks):
    options: ClassVar[Mapping[str, Any]] = {"allow_unused": True}


class AsksByBackward(AuxiliaryStep):
    def added(self) -> Tensor:
        F.cross_entropy(self.net(X), Y).backward(inputs=list(self.net.parameters()))
        return torch.zeros((), requires_grad=True)


class AsksBeforeTheOptimizer(AsksWhatIsUnused):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Nothing."""

    def on_before_optimizer_step(self, optimizer):
        self.added()


class Prototypes(Net):
    """What a hook computes the next step compares with: a buffer, and an attribute."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototype", torch.zeros(3))

    def on_train_batch_start(self, batch, batch_idx):
        self.prototype = self.net(X).mean(0)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) + self.prototype, y)


class PlainPrototypes(Prototypes):
    def __init__(self) -> None:
        super().__init__()
        del self.prototype


class Energy(nn.Module):
    """Its forward differentiates: forces of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=self.training)
        return force


class Saliency(Net):
    """Gradients of inputs, and numbers of what was computed outside; an own step with what is detached."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.energy = Energy()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), Y), x)
        shown = self.net(X)
        offset = torch.zeros(3, requires_grad=True)
        F.cross_entropy(shown.detach() + offset, Y).backward()
        self.seen += [slope, shown.requires_grad, shown.detach().clone(), float(shown.sum()), offset.grad]
        self.seen += [self.energy(X).detach(), torch.func.grad(lambda x: F.cross_entropy(self.net(x), Y))(X).detach()]
        features = self.net[:2](X).detach().requires_grad_()
        self.seen += torch.autograd.grad(self.net[2](features).square().sum(), features)

    def extra(self) -> Any:
        return self.seen


REFUSED = [
    *(Rehearses, AuxiliaryStep, SavesNothing, Prototypes, PlainPrototypes),
    *(Asks, AsksWhatIsUnused, AsksByBackward, AsksBeforeTheOptimizer),
]


@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_of_parameters_outside_of_steps_are_refused(kind: type[Net], worlds: Worlds) -> None:
    """On one device they are added to, without an error; here nobody would reduce them."""
    for text, _ in worlds(2).run(failure, kind):
        assert text.startswith("CaptureError: test_outside_gradients.py:"), text
        assert "outside of a step" in text and ("is differentiated: nobody" in text or "which torch cannot" in text)


def test_gradients_of_inputs_and_what_is_detached_are_as_on_one_device(worlds: Worlds) -> None:
    alone = train(Saliency, None)
    outcomes = worlds(2).run(train, Saliency, MESH)
    assert_equals_one_device(outcomes, alone)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, alone.extra, rtol=1e-5, atol=1e-6)
