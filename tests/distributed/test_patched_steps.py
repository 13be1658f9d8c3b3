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
