"""A run of the step leaves the module as it was."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.effects import NoEffects, undone_afterwards
from lightning_autoparallel.errors import CaptureError
from tests.unit._graphs import captured


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.cache = 0, None
        self.kept: list[int] = [1]
        self.table: dict[str, int] = {"a": 1}
        self.seen: set[int] = {1}
        self.register_buffer("mean", torch.zeros(2))


def state(module: Stateful) -> dict:
    return {name: repr(value) for name, value in vars(module).items()}


def everything(module: Stateful) -> None:
    module.count += 1
    module.cache = torch.ones(2)
    module.new = 3
    module.kept.append(2)
    module.table["b"] = 2
    module.seen.add(2)
    module.mean = module.mean + 1
    module.inner.note = "inside"
    module.inner.weight.requires_grad_(True)
    del module.training


def test_attributes_and_containers_are_restored():
    module = Stateful()
    before, inner, kept, mean = state(module), dict(vars(module.inner)), module.kept, module.mean
    with undone_afterwards(module):
        everything(module)
    assert state(module) == before
    assert vars(module.inner) == inner
    assert module.kept is kept and module.mean is mean


def test_it_is_restored_after_a_failure_too():
    module = Stateful()
    before = state(module)
    with pytest.raises(ValueError, match="in the step"), undone_afterwards(module):
        everything(module)
        raise ValueError("in the step")
    assert state(module) == before


def test_a_pure_step_changes_nothing():
    with undone_afterwards(Stateful()), NoEffects().recording():
        torch.ones(2).sum()
    assert NoEffects().tensors() == []


class Frozen(OrderedDict):
    """A configuration that refuses changes, and copies too."""

    def refuse(self, *_):
        raise TypeError("frozen")

    __delitem__ = clear = update = copy = pop = refuse


class WithFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), Frozen(width=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.config["width"]


def test_containers_that_refuse_changes_are_left_alone():
    module = WithFrozen()
    captured(module, torch.ones(2, 4))
    assert module.config == {"width": 4}


class Reorders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), OrderedDict(b=1, a=2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.move_to_end("b")
        return self.linear(x).sum()


def test_an_ordered_dict_that_a_refused_step_changed_has_its_order_again():
    module = Reorders()
    with pytest.raises(CaptureError, match=r"self\.seen"):
        captured(module, torch.ones(2, 4))
    assert list(module.seen.items()) == [("b", 1), ("a", 2)]
    assert module.seen.popitem() == ("a", 2) and list(module.seen) == ["b"]
