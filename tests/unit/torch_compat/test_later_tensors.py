"""Tensors whose bytes are asked for when they are written."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.later_tensors import LaterTensor

VALUES = {
    "matrix": torch.arange(6.0).view(2, 3),
    "columns": torch.arange(6.0).view(2, 3).t(),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "nothing": torch.empty(0, 3),
    "part": torch.arange(100)[5:8],
    "sixteen bits": torch.tensor([1, 65535], dtype=torch.uint16),
    "eight bits": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
}


def later(value: Tensor) -> LaterTensor:
    return LaterTensor(value.shape, value.dtype, lambda: value)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_holds_the_values(name: str, mapped: bool, tmp_path: Path) -> None:
    value, path = VALUES[name], tmp_path / "file.pt"
    torch.save({"before": torch.ones(2), "value": later(value)}, path)
    found = torch.load(path, weights_only=True, mmap=mapped)["value"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    torch.testing.assert_close(found.float(), value.float(), rtol=0, atol=0)
    assert found.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert zipfile.ZipFile(path).testzip() is None  # the first record with a wrong checksum


def test_values_are_asked_for_one_after_another(tmp_path: Path) -> None:
    asked: list[int] = []

    def make(number: int) -> Tensor:
        asked.append(number)
        return torch.full((4,), float(number))

    state = [LaterTensor(torch.Size([4]), torch.float32, lambda i=i: make(i)) for i in range(3)]
    copied = copy.deepcopy(state)
    assert not asked
    torch.save(copied, tmp_path / "file.pt")
    assert asked == [0, 1, 2]
    assert [tensor[0].item() for tensor in torch.load(tmp_path / "file.pt")] == asked


def test_what_is_there_twice_is_written_once(tmp_path: Path) -> None:
    one = later(VALUES["matrix"])
    torch.save([one, one], tmp_path / "file.pt")
    first, second = torch.load(tmp_path / "file.pt")
    assert first.data_ptr() == second.data_ptr()
