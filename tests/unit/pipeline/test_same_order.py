"""Ranks whose final graphs differ are told so, with the node; equal ones exchange one small message."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch import fx

from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.pipeline.same_order import check_same_order, difference_between_ranks
from tests.unit.cost._graphs import Builder, aten


def _partitioned(*, swapped: bool, shift: int) -> PartitionedGraph:
    """Two calls of one input, in one order or the other; a number that each rank has its own of."""
    build = Builder()
    x = build.input(4, 4)
    kept, moved = build.call(aten.neg.default, x), build.call(aten.add.Scalar, x, shift)
    if swapped:
        kept.prepend(moved)
    module = fx.GraphModule({}, build.output(kept, moved))
    return PartitionedGraph(sharded=None, forward=module, backward=module)


class _Control:
    """The control group as rank 1 sees it, where rank 0 runs ``theirs``."""

    alone = False

    def __init__(self, theirs: PartitionedGraph | None = None) -> None:
        self.first: dict[str, Any] = {}
        if theirs is not None:
            with contextlib.suppress(PassError, AssertionError):
                check_same_order(theirs, self)

    def agrees(self, text: str) -> bool:
        return self.first.setdefault("text", text) == text and "lines" in self.first

    def gather(self, lines: list[str]) -> list[list[str]]:
        return [self.first.setdefault("lines", lines), lines]


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_orders_agree_though_numbers_differ(swapped: bool):
    control = _Control(_partitioned(swapped=swapped, shift=0))
    check_same_order(_partitioned(swapped=swapped, shift=1), control)


def test_the_first_call_that_differs_is_named():
    control = _Control(_partitioned(swapped=False, shift=0))
    with pytest.raises(PassError, match=r"rank 1 differs at add_scalar of the forward from rank 0, so that their"):
        check_same_order(_partitioned(swapped=True, shift=0), control)


def test_who_is_alone_writes_nothing_to_compare() -> None:
    """Planning for thousands of ranks is done by one."""
    alone = _Control()
    alone.alone = True
    assert difference_between_ranks(lambda: pytest.fail("lines were made"), alone) is None
