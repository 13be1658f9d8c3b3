"""Builtins that functions of the user's get while a step is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_autoparallel.capture.conversions import CONVERTERS, only_called
from lightning_autoparallel.torch_compat.tracing import mark_parameter

type_of = CONVERTERS["type"]


def test_types_of_stand_ins() -> None:
    with FakeTensorMode():
        made, parameter = torch.ones(2), torch.ones(2)
    mark_parameter(parameter)
    assert type_of(made) is torch.Tensor
    assert type_of(parameter) is nn.Parameter
    is_instance = CONVERTERS["isinstance"]
    assert is_instance(parameter, nn.Parameter)
    assert is_instance(parameter, (int, nn.Parameter))
    assert is_instance(parameter, torch.Tensor)
    assert not is_instance(parameter, (int, nn.Module))
    assert not is_instance(made, nn.Parameter)
    assert not isinstance(parameter, nn.Parameter)  # torch's own modules take leaves only


def test_types_of_everything_else() -> None:
    for value in (1, "a", [], nn.Linear(1, 1), nn.Parameter(torch.ones(1)), torch.ones(1), int):
        assert type_of(value) is type(value)
    made = type_of("Made", (list,), {"a": 1})
    assert issubclass(made, list)
    assert made.a == 1
    assert type_of[nn.Module] == type[nn.Module]
    assert isinstance(int, type_of)
    assert not isinstance(1, type_of)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return type(x) is int\n", {"type"}),
        ("def f(x: type, y):\n    return isinstance(x, type) and float(y)\n", {"type", "float", "isinstance"}),
        ("class Meta(type):\n    pass\n", set()),
        ("def f(x):\n    return x is int\n", set()),
        ("kinds = {type: 1}\n", set()),
    ],
)
def test_files_that_only_call(text: str, expected: set[str], tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert only_called(str(file)) == expected
