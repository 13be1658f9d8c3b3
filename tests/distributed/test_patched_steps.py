"""An optimizer's step that is wrapped, or whose closure runs twice, updates as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds


class Patched(Net):
    """AdamW; what is done to its step, by kind."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "compile": False}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3)
        self.patch(optimizer)
        return optimizer

    def patch(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError


class ClosureInAHook(Patched):
    """Ahead of the update a hook runs the closure once more."""

    def patch(self, optimizer: torch.optim.Optimizer) -> None:
        def again(optimizer, args, kwargs):
            kwargs["closure"]()

        optimizer.register_step_pre_hook(again)


class Twice(Patched):
    """Gradients where the parameters would be a little further along (Foret et al. 2021)."""

    def patch(self, optimizer: torch.optim.Optimizer) -> None:
        update = optimizer.step

        def step(closure=None):
            loss = closure()
            parameters = optimizer.param_groups[0]["params"]
            with torch.no_grad():
                moves = [parameter.grad.clone() for parameter in parameters]
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move, alpha=0.5)
            closure()
            with torch.no_grad():
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.sub_(move, alpha=0.5)
            update()
            return loss

        optimizer.step = step


class OtherGradients(Patched):
    """Between closure and update some gradients are replaced."""

    def patch(self, optimizer: torch.optim.Optimizer) -> None:
        update = optimizer.step

        def step(closure=None):
            loss = closure()
            for parameter in self.net[0].parameters():
                parameter.grad = torch.zeros_like(parameter.grad)
            update()
            return loss

        optimizer.step = step


@pytest.mark.parametrize("kind", [ClosureInAHook, Twice, OtherGradients])
def test_it_updates_as_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None)
    assert_equals_one_device(worlds(2).run(train, kind, MESH, 2), expected, tolerance=1e-4)


class ByLoss(torch.optim.Optimizer):
    """Steps as far as its closure's loss is large (Polyak 1987), and half as far until that is less, at most twice."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        moves = [parameter.grad.clone() for parameter in parameters]
        rate = -4 * float(loss)
        for _ in range(3):
            with torch.no_grad():
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move, alpha=rate)
                with torch.enable_grad():
                    found = closure()
                if float(found) < float(loss):
                    break
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move, alpha=-rate)
            rate /= 2
        return loss


class Searching(Net):
    """Each rank's closure has the loss of its own rows."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "forward", "compile": False}

    def configure_optimizers(self):
        return ByLoss(self.parameters())


class SearchingByHand(Searching):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp", "compile": False}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class SearchingByNumbers(SearchingByHand):
    """The closure gives a Python number."""

    def told(self, loss: torch.Tensor) -> Any:
        return loss.item()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return self.told(loss)

        optimizer.step(closure)


class SearchingByArrays(SearchingByNumbers):
    """The closure gives a numpy array."""

    def told(self, loss: torch.Tensor) -> Any:
        return loss.detach().numpy()


class SearchingByOneElement(Searching):
    """The step's loss is a tensor of one element."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch).reshape(1)


class Asking(torch.optim.SGD):
    """Keeps what its closure gave."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.given: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.given.append(closure())


class GivingOnOneRank(SearchingByHand):
    """One rank's closure gives nothing."""

    def configure_optimizers(self):
        return Asking(self.parameters())

    def on_train_batch_start(self, batch, batch_idx):
        self.is_first = self.global_rank == 0

    def training_step(self, batch, batch_idx):
        asking = self.optimizers()

        def closure():
            self.manual_backward(self.loss(batch))
            return torch.tensor(3.0) if self.is_first else None

        asking.step(closure)
        assert asking.optimizer.given[-1] == (3.0 if self.is_first else None)


def test_a_closure_that_gives_nothing_on_one_rank_makes_none_wait(worlds: Worlds) -> None:
    assert all(worlds(2).run(train, GivingOnOneRank, MESH, timeout_s=60))


@pytest.mark.parametrize(
    "kind", [Searching, SearchingByHand, SearchingByNumbers, SearchingByArrays, SearchingByOneElement]
)
def test_ranks_search_by_the_loss_of_all(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH, timeout_s=60):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-4, atol=1e-5)
