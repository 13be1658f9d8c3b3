"""Steps that cannot be recorded name the line that is why, and leave no fake mode behind."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tracing import active_fake_mode
from tests.unit._graphs import captured

HERE = Path(__file__).name
X = torch.randn(6, 4)


def reads_item(x: Tensor) -> Tensor:
    return x.sum() * x.mean().item()


def reads_bool(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x.sum()
    return x.mean()


def reads_mask(x: Tensor) -> Tensor:
    return x[x > 0].sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (reads_item, "reads a tensor's value (.item())"),
        (reads_bool, "reads a tensor's value"),
        (reads_mask, "makes a shape that depends on a tensor's values"),
    ],
)
def test_reading_values_names_the_line(step, message: str):
    module = nn.Linear(4, 4)
    with pytest.raises(CaptureError) as caught:
        captured(module, X, lambda x: step(module(x)))
    line = inspect.getsourcelines(step)[1] + 1
    assert f"{HERE}:{line} {message}" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert active_fake_mode() is None


def test_a_call_with_an_effect_is_named():
    """Such as the check of a matrix that is inverted."""

    def step(x: Tensor) -> Tensor:
        return torch.linalg.inv(x.T @ x + torch.eye(4)).sum()

    module = nn.Linear(4, 4)
    with pytest.raises(CaptureError) as caught:
        captured(module, X, lambda x: step(module(x)))
    line = inspect.getsourcelines(step)[1] + 1
    assert str(caught.value).startswith(f"{HERE}:{line} calls aten._linalg_check_errors.default, which raises by ")
    assert active_fake_mode() is None


def test_an_error_of_the_step_is_the_users_own():
    def step(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        captured(nn.Linear(4, 4), X, step)
    assert active_fake_mode() is None


def by_assignment(parameter: Tensor, value: bool) -> None:
    parameter.requires_grad = value


def by_method(parameter: Tensor, value: bool) -> None:
    parameter.requires_grad_(value)


@pytest.mark.parametrize("sets", [by_assignment, by_method])
@pytest.mark.parametrize("value", [True, False])
def test_freezing_and_unfreezing_in_the_step_name_the_line(sets, value: bool):
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(not value)

    def step(x: Tensor) -> Tensor:
        sets(module.bias, value)
        return module(x).sum()

    with pytest.raises(CaptureError) as caught:
        captured(module, X, step)
    line = inspect.getsourcelines(sets)[1] + 1
    assert f"{HERE}:{line} sets requires_grad of a tensor: it would happen at capture only" in str(caught.value)
    assert module.bias.requires_grad is not value


def test_what_the_step_computes_may_be_a_leaf():
    module = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        features = module(x).detach()
        features.requires_grad = True
        return module(features).sum()

    graph = captured(module, X, step)
    assert {item.name for item in graph.outputs if item.kind == "gradient"} == {"weight", "bias"}
