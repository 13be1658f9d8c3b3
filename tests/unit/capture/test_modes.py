"""What a module's state is, and what of it the next step computes with, whatever was put in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_autoparallel.capture import ModuleStates


def norm_and_linear() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def another_buffer(module: nn.Sequential) -> None:
    module[0].running_mean = torch.ones(4)


def another_table(module: nn.Sequential) -> None:
    module[0]._buffers = {name: buffer.clone() for name, buffer in module[0]._buffers.items()}


def another_parameter(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.ones(2, 4))


def one_more(module: nn.Sequential) -> None:
    module[1].register_buffer("seen", torch.zeros(1))


def another_module(module: nn.Sequential) -> None:
    module[0] = nn.BatchNorm1d(4)


@pytest.mark.parametrize("change", [another_buffer, another_table, another_parameter, one_more, another_module])
def test_parameters_and_buffers_are_those_of_the_last_look(change: Callable[[nn.Sequential], None]) -> None:
    module = norm_and_linear()
    states = ModuleStates(module)
    before = states.key()
    change(module)
    after = states.key()
    assert [id(p) for p in states.parameters] == [id(p) for p in module.parameters()]
    assert {n: id(b) for n, b in states.buffers.items()} == {n: id(b) for n, b in module.named_buffers()}
    assert (after == before) == (change not in (one_more, another_module))


def test_modes_and_frozen_parameters_are_states() -> None:
    module = norm_and_linear()
    states = ModuleStates(module)
    keys = [states.key(), states.key()]
    module[0].eval()
    keys.append(states.key())
    module[1].bias.requires_grad_(False)
    keys.append(states.key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
