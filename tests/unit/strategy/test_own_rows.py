"""What of a prediction is another rank's: the last of four rows, or of two where containers are as long as a batch."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy
import pytest
import torch

from lightning_autoparallel.strategy.own_rows import OwnRows

Two = collections.namedtuple("Two", "logits labels")


@dataclasses.dataclass(frozen=True)
class Result:
    """A user's."""

    scores: Any
    kind: str


def plain(value: Any) -> Any:
    """With lists for arrays and tensors, for comparisons."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


CUT = [
    (4, torch.arange(4), [0, 1, 2]),
    (4, numpy.arange(4), [0, 1, 2]),
    (4, [0.5, 1.5, 2.5, 3.5], [0.5, 1.5, 2.5]),
    (4, ["a", "b", "c", "d"], ["a", "b", "c"]),
    (
        4,
        {"ids": [1, 2, 3, 4], "scores": numpy.arange(4), "kind": "test"},
        {"ids": [1, 2, 3], "scores": [0, 1, 2], "kind": "test"},
    ),
    # of each row one thing, which may be as long as the batch
    (
        4,
        [{"boxes": ones(4)}, {"boxes": ones(0)}, {"boxes": ones(1)}, {"boxes": ones(4)}],
        [{"boxes": [1] * 4}, {"boxes": []}, {"boxes": [1]}],
    ),
    (4, (ones(1), ones(4), ones(2), ones(2)), ([1], [1] * 4, [1, 1])),
    (4, ([1], [], [2, 3], [4]), ([1], [], [2, 3])),
    (2, [{"boxes": ones(1)}, {"boxes": ones(3)}], [{"boxes": [1]}]),
    (2, [[0.5, 1.5], [2.5, 3.5]], [[0.5, 1.5]]),
    (2, [(7, 0.5), (8, 1.5)], [(7, 0.5)]),
    # as many results as rows
    (2, [["a", "b"], [1, 2]], [["a"], [1]]),
    (2, (ones(2, 2), ones(2)), ([[1, 1]], [1])),
    (2, (ones(2), ones(2)), ([1], [1])),
    (2, [ones(2, 2), ["a", "b"]], [[[1, 1]], ["a"]]),
    (2, ({"a": ones(2)}, {"a": ones(2)}), ({"a": [1]}, {"a": [1]})),
    (2, {0: ones(2), 1: ones(2)}, {0: [1], 1: [1]}),
    (2, Two(ones(2), [1, 2]), Two(ones(1), [1])),
    (4, [(ones(4), ["a"] * 4)], [([1, 1, 1], ["a", "a", "a"])]),
]


@pytest.mark.parametrize(("rows", "output", "expected"), CUT)
def test_rows_of_others_are_cut_off(rows: int, output: Any, expected: Any) -> None:
    own = OwnRows(rows, 1, None, None)
    assert plain(own.cut(output)) == plain(expected)
    assert own.are_found and not own.doubts


def test_fields_are_cut_in_a_copy() -> None:
    output = Result(numpy.arange(4), "test")
    cut = OwnRows(4, 1, None, None).cut(output)
    assert (plain(cut.scores), cut.kind, len(output.scores)) == ([0, 1, 2], "test", 4)


def test_lists_of_the_batch_are_compared_with_plain_ones_only() -> None:
    output = [torch.ones(2), torch.ones(3)]
    assert len(OwnRows(2, 1, [0.5, 1.5], None).cut(output)) == 1


def test_a_tuple_of_numbers_has_the_rows_where_the_batch_holds_it() -> None:
    assert OwnRows(2, 1, {"ids": (7, 8)}, None).cut((7, 8)) == (7,)


DOUBTS = [
    (None, "nothing"),
    (0.5, "a float"),
    (7, "a int"),
    ({"mean": 0.5, "scores": [1, 2]}, "a float"),
    (torch.tensor(0.5), "a Tensor of shape []"),
    ({"boxes": torch.ones(7, 6), "scores": torch.ones(2)}, "a Tensor of shape [7, 6]"),
    (numpy.ones((6, 2)), "a ndarray of shape [6, 2]"),
    ([0.5, 1.5, 2.5], "a list of length 3"),
    ({"captions": ["a", "b", "c", "d"], "ids": [1, 2]}, "a list of length 4"),
    ([{"box": torch.ones(2)}, {"box": torch.ones(3)}, {"box": torch.ones(2)}], "a list of length 3"),
    ({7: torch.ones(2), 8: torch.ones(3)}, "a dict of length 2"),
    ((0.5, 1.5), "a float"),
    ([torch.ones(2), torch.ones(2)], "a list of 2 results, taken for one of each row, that have as many rows each"),
]


@pytest.mark.parametrize(("output", "said"), DOUBTS)
def test_what_may_hold_rows_of_others_is_said(output: Any, said: str) -> None:
    own = OwnRows(2, 1, None, None)
    own.cut(output)
    assert own.doubts[0] == said


def test_of_a_captured_step_it_is_known_which_tensors_have_rows() -> None:
    table, scores = torch.ones(2, 3), torch.ones(3, 2)
    own = OwnRows(2, 1, {"names": ["a", "b"]}, lambda tensor: 1 if tensor is scores else None)
    cut = own.cut([table, scores, ["a", "b"]])
    assert [cut[0].shape, cut[1].shape, cut[2]] == [(2, 3), (3, 1), ["a"]]
    assert plain(own.cut([table, table])) == plain([table, table])
