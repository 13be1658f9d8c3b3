"""Batches of any nesting come back as they were, and the batch dim is found."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from lightning_autoparallel.capture import check_rows, describe_batch, flatten_batch, ragged_part
from lightning_autoparallel.errors import CaptureError, ConfigError


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


class Pair:
    """An own class, as data sets make them; knows where it came from."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.nested, self.source = x, {"y": y}, self

    def to(self, device: Any) -> Pair:
        return Pair(self.x.to(device), self.nested["y"].to(device))


class Frozen:
    __slots__ = ("name", "x")

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "name", "a")

    def __setattr__(self, *_: Any) -> None:
        raise AttributeError("frozen")


@dataclass
class Derived:
    x: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


OBJECTS = [
    (Pair(torch.ones(2), torch.zeros(2)), ["x", "nested.y", "source"]),
    (Frozen(torch.ones(2)), ["name", "x"]),
    (Derived(torch.ones(2)), ["x", "twice"]),
    (deque([torch.ones(2), 3]), ["0", "1"]),
    (defaultdict(list, a=torch.ones(2)), ["a"]),
    (UserDict(a=torch.ones(2)), ["a"]),
]


@pytest.mark.parametrize(("batch", "paths"), OBJECTS, ids=lambda value: type(value).__name__)
def test_objects_are_their_attributes(batch, paths):
    leaves, rebuild = flatten_batch(batch)
    assert [path for path, _ in leaves] == paths
    made = rebuild([leaf + 1 if isinstance(leaf, Tensor) else leaf for _, leaf in leaves])
    assert type(made) is type(batch) and made is not batch
    now = dict(flatten_batch(made)[0])
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            assert torch.equal(now[path], leaf + 1)


def test_what_has_no_tensors_is_a_leaf():
    lost = object()
    assert flatten_batch([lost, Pair(1, 2)])[0][0] == ("0", lost)
    assert len(flatten_batch([Pair(1, 2)])[0]) == 1


def test_ragged_parts_are_found():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert ragged_part({"a": [packed]}) == "PackedSequence"
    assert ragged_part([Pair(torch.ones(2).to_sparse(), 1)]) == "torch.sparse_coo tensor"
    assert ragged_part([Pair(torch.ones(2), 1), "text", None]) is None


X, Y, TIME = torch.ones(8, 5), torch.ones(8), torch.ones(5, 8, 2)


def test_the_loaders_rows_are_in_dim_0():
    assert check_rows([("x", X), ("y", Y)], 8) is None
    assert check_rows([("x", TIME), ("y", Y)], None) is None
    with pytest.raises(CaptureError, match=r"batch leaf 'x' has shape \[5, 8, 2\].*its dim 1 is the batch"):
        check_rows([("x", TIME), ("y", Y)], 8)
    said = check_rows([("x", TIME)], 8)
    assert said is not None and "batch_dims={'x': null}" in said


class Rows(Mapping):
    """Has keys, but iterates over rows, as a TensorDict does, and is registered with torch's pytree."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.rows = data, len(next(iter(data.values())))

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self):
        return iter([{key: value[i] for key, value in self.data.items()} for i in range(self.rows)])

    def __len__(self) -> int:
        return self.rows

    def keys(self):
        return self.data.keys()


register_pytree_node(
    Rows,
    lambda rows: (list(rows.data.values()), list(rows.data)),
    lambda items, keys: Rows(dict(zip(keys, items, strict=True))),
)


class Sorted(Encoding):
    """Is registered so that its parts come in another order than its keys."""


class Half(Encoding):
    """Has a part that no key leads to."""


register_pytree_node(
    Sorted,
    lambda value: ([value[key] for key in sorted(value)], sorted(value)),
    lambda parts, keys: Sorted(dict(zip(keys, parts, strict=True))),
)
register_pytree_node(Half, lambda value: ([value["x"], 2.0], None), lambda parts, _: Half({"n": 3, "x": parts[0]}))


def test_parts_of_a_registered_mapping_have_the_keys_that_lead_to_them():
    x, y = torch.zeros(2), torch.ones(3)
    assert [path for path, _ in flatten_batch(Sorted({"x": x, "labels": y}))[0]] == ["labels", "x"]
    assert [path for path, _ in flatten_batch(Half({"n": 3, "x": x}))[0]] == ["0", "1"]


def test_a_registered_mapping_that_iterates_over_rows():
    leaves, rebuild = flatten_batch({"in": Rows({"x": torch.arange(4), "y": torch.ones(4, 2)})})
    assert [path for path, _ in leaves] == ["in.x", "in.y"]
    rebuilt = rebuild([torch.zeros(8), torch.zeros(8, 2)])["in"]
    assert type(rebuilt) is Rows and rebuilt.rows == 8
