"""Numbers that a step logs are made on the device, as the tensors that Lightning would copy there."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_autoparallel.strategy.logged_numbers import with_numbers_on

META = torch.device("meta")  # any that is no CPU
MODULE = LightningModule()


@pytest.mark.parametrize("number", [0.1, 3, -7.25, math.inf, -math.inf, 3.4e38, 1e-45, 2**24 + 1, 2**53])
def test_a_number_is_the_tensor_that_lightning_makes(number: float, monkeypatch: pytest.MonkeyPatch):
    made: list[torch.Tensor] = []
    real = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, device, **options: made.append(real(*args, **options)) or made[-1])
    args = with_numbers_on(META, LightningModule.log, (MODULE, "name", number, True))
    assert args == (MODULE, "name", made[0], True)
    expected = torch.tensor(number, dtype=torch.get_default_dtype())
    assert torch.equal(made[0], expected) and made[0].dtype == expected.dtype


def test_each_number_of_a_dict():
    tensor = torch.ones(())
    _, values, on_step = with_numbers_on(
        META, LightningModule.log_dict, (MODULE, {"a": 1.0, "b": tensor, "c": 2}, False)
    )
    assert values["b"] is tensor and on_step is False
    assert [values[name].device for name in "ac"] == [META, META] and values["c"].shape == ()


@pytest.mark.parametrize("value", [torch.ones(()), True, 2**53 + 1, 1e39, -1e300, None, "text", [1.0]], ids=repr)
def test_what_lightning_is_given_as_it_is(value: object):
    assert with_numbers_on(META, LightningModule.log, (MODULE, "name", value))[2] is value


def test_nothing_changes_on_a_cpu_or_for_other_functions():
    args = (MODULE, "name", 1.0)
    assert with_numbers_on(torch.device("cpu"), LightningModule.log, args) is args
    assert with_numbers_on(META, LightningModule.print, args) is args
