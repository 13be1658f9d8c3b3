"""The number that a closure's loss is, and the mean of several in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_autoparallel.strategy.told_losses import number_of, told_as

ONE = [
    torch.tensor(2.0),
    torch.tensor([[2.0]], dtype=torch.float64),
    torch.tensor(2.0, dtype=torch.bfloat16),
    2.0,
    np.float32(2.0),
    np.array([2.0]),
]


@pytest.mark.parametrize("loss", ONE, ids=repr)
def test_the_mean_is_given_as_the_loss_was(loss: Any) -> None:
    assert number_of(loss) == 2.0
    told = told_as(loss, 0.5)
    assert type(told) is type(loss)
    assert number_of(told) == 0.5
    assert getattr(told, "shape", ()) == getattr(loss, "shape", ())
    assert getattr(told, "dtype", None) == getattr(loss, "dtype", None)


@pytest.mark.parametrize("loss", [3, np.int64(3), torch.tensor([3]), np.array(3)], ids=repr)
def test_the_mean_of_whole_numbers_need_be_none(loss: Any) -> None:
    assert number_of(loss) == 3.0
    assert number_of(told_as(loss, 2.5)) == 2.5


@pytest.mark.parametrize(
    "loss", [None, True, "2.0", torch.ones(2), torch.tensor(True), torch.tensor(1j), np.ones(2), [2.0]], ids=repr
)
def test_what_is_no_number(loss: Any) -> None:
    assert number_of(loss) is None


def test_its_gradient_is_that_of_the_loss() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    told = told_as(weight * 3, 1.0)
    assert float(told.detach()) == 1.0
    told.backward()
    assert weight.grad is not None and float(weight.grad) == 3.0
