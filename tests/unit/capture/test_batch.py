"""Batches of any nesting come back as they were, and the batch dim is found."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_autoparallel.capture import describe_batch, flatten_batch
from lightning_autoparallel.errors import ConfigError


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: Any
    label: Any = 0


class Encoding(Mapping):
    """A read-only mapping, as tokenizers return."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


BATCHES = [
    (7, {"": 7}),
    ({"a": 1, "b": (2, [3, 4])}, {"a": 1, "b.0": 2, "b.1.0": 3, "b.1.1": 4}),
    (Point(x=1, y={"z": 2}), {"x": 1, "y.z": 2}),
    ([Sample(image=1, label=(2,))], {"0.image": 1, "0.label.0": 2}),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (Encoding({"ids": 1, "mask": 2}), {"ids": 1, "mask": 2}),
    ({1: "one", "empty": []}, {"1": "one"}),
    ((), {}),
    (None, {"": None}),
]


@pytest.mark.parametrize(("batch", "expected"), BATCHES, ids=lambda value: type(value).__name__)
def test_leaves_and_their_paths(batch, expected):
    leaves, _ = flatten_batch(batch)
    assert dict(leaves) == expected


@pytest.mark.parametrize("batch", [batch for batch, _ in BATCHES], ids=lambda value: type(value).__name__)
def test_round_trip(batch):
    leaves, rebuild = flatten_batch(batch)
    rebuilt = rebuild([leaf for _, leaf in leaves])
    assert type(rebuilt) is type(batch)
    assert plain(rebuilt) == plain(batch)


def test_new_leaves_take_the_old_places():
    leaves, rebuild = flatten_batch({"a": Point(x=1, y=2), "b": [Sample(image=3), 4]})
    new = rebuild([leaf * 10 if isinstance(leaf, int) else leaf for _, leaf in leaves])
    assert new == {"a": Point(x=10, y=20), "b": [Sample(image=30, label=0), 40]}


def plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Encoding) else value


def batched(batch: Any, batch_dims: Any = None) -> dict[str, bool]:
    leaves, _ = flatten_batch(batch)
    return {leaf.path: leaf.batched for leaf in describe_batch(leaves, batch_dims).leaves}


BATCH = {"x": torch.zeros(4, 3), "y": torch.zeros(4), "table": torch.zeros(7, 4), "scale": torch.tensor(2.0), "id": "a"}


def test_tensors_of_the_batch_length_carry_the_batch():
    assert batched(BATCH) == {"x": True, "y": True, "table": False, "scale": False, "id": False}


@pytest.mark.parametrize(
    ("batch_dims", "changed"),
    [
        ({"table": 0}, {"table": True}),
        ({"x": None}, {"x": False}),
        ({"?": None}, {"x": False, "y": False}),
        ({"x": None, "*": 0}, {"x": True, "y": True, "table": True, "scale": True}),
        (0, {"table": True, "scale": True}),
    ],
    ids=str,
)
def test_batch_dims_correct_the_guess(batch_dims, changed):
    assert batched(BATCH, batch_dims) == batched(BATCH) | changed


@pytest.mark.parametrize(
    ("batch_dims", "message"),
    [
        ({"x": 1}, "batch_dims['x']=1: only dim 0 can be the batch"),
        (1, "batch_dims['*']=1: only dim 0"),
        ({"z*": 0}, "batch_dims['z*'] matches no leaf of the batch; leaves are x, y, table, scale, id"),
    ],
    ids=str,
)
def test_impossible_batch_dims_are_refused(batch_dims, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        batched(BATCH, batch_dims)


def test_the_global_batch_has_all_rows():
    layout = describe_batch(flatten_batch(BATCH)[0])
    assert [leaf.global_shape(3) for leaf in layout.tensors] == [(12, 3), (12,), (7, 4), ()]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (BATCH, True),
        (BATCH | {"id": "another"}, True),  # strings name rows
        (BATCH | {"x": torch.ones(4, 3)}, True),
        (BATCH | {"x": torch.zeros(4, 3).double()}, False),
        (BATCH | {"x": torch.zeros(4, 2)}, False),
        (BATCH | {"id": 5}, False),
    ],
)
def test_batches_that_share_a_graph(other, same: bool):
    mine, theirs = (describe_batch(flatten_batch(batch)[0]) for batch in (BATCH, other))
    assert (mine == theirs) == same
    assert (hash(mine) == hash(theirs)) or not same


def test_truth_values_in_a_batch_distinguish_it_and_numbers_do_not():
    """What the step decides by a number is a guard."""
    layouts = [describe_batch(flatten_batch({"x": torch.zeros(2), "n": n})[0]) for n in (3, 4, True, False)]
    assert layouts[0] == layouts[1] and layouts[2] != layouts[3]
    assert [str(layout) for layout in layouts[1:3]] == ["x: float32[2], n: 'int'", "x: float32[2], n: True"]


def test_a_batch_that_is_a_tensor():
    (leaf,) = describe_batch(flatten_batch(torch.zeros(2, 5))[0]).leaves
    assert (leaf.path, leaf.shape, leaf.batched) == ("", (2, 5), True)
    assert isinstance(flatten_batch(torch.zeros(2))[1]([torch.ones(2)]), Tensor)
