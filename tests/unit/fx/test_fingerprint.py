"""Fingerprints tell tensors apart that differ in one element, or in the order of some, small and large."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_autoparallel.fx.values import fingerprint

SHAPES = [(3, 5), (64, 64), (70, 999), (512, 1031)]
DTYPES = [torch.int64, torch.float32, torch.bfloat16]


def one_element(values: Tensor) -> None:
    values[-1, -1] += 1


def two_in_a_row(values: Tensor) -> None:
    values[1, [0, 2]] = values[1, [2, 0]]


def two_rows(values: Tensor) -> None:
    values[[0, 1]] = values[[1, 0]]


def rows_but_for_the_first_column(values: Tensor) -> None:
    values[:, 0] = 0
    values[:, 1:] = values.flip(0)[:, 1:]


@pytest.mark.parametrize("change", [one_element, two_in_a_row, two_rows, rows_but_for_the_first_column])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_change_is_seen(change: Callable[[Tensor], None], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[0, :3], values[1, :3] = torch.tensor([1, 2, 3]).to(dtype), torch.tensor([4, 5, 6]).to(dtype)
    values[:, 0] = 0
    values[1, 0] = 7
    before, same = fingerprint(values), fingerprint(values.clone())
    change(values)
    assert before == same
    assert fingerprint(values) != before


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (300, 1001)], ids=str)
def test_of_any_kind(shape: tuple[int, ...]) -> None:
    values = torch.ones(shape, dtype=torch.complex64)
    assert fingerprint(values) == fingerprint(values.numpy())
    assert fingerprint(values.conj()) == fingerprint(values.conj().resolve_conj())
    assert fingerprint(values.real) == fingerprint(np.ones(shape, np.float32))
