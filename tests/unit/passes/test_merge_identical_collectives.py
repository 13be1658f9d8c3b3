"""Equal collectives of equal values are launched once; what only looks equal is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.merge_identical_collectives import merge_identical_collectives
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import run_lockstep

aten = torch.ops.aten


class Draft:
    """A graph of calls on (4, 4) tensors; ``region`` marks the calls that follow as a checkpoint region's."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.region: int | None = None

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(4, 4)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(4, 4)
        if self.region is not None:
            node.meta["custom"] = {"checkpoint_region": self.region}
        return node

    def reduce(self, value: fx.Node, op: str = "sum", group: str = "g") -> fx.Node:
        return self.call(collectives.WAIT, self.call(collectives.ALL_REDUCE, value, op, group))

    def merged(self, *outputs: fx.Node) -> int:
        """Collectives left after the pass."""
        self.graph.output(list(outputs))
        merge_identical_collectives(self.graph)
        self.graph.lint()
        return len(list(fxn.collectives_of(self.graph)))


@pytest.mark.parametrize(("axes", "left"), [(("tp", "tp"), 1), (("dp_shard", "tp"), 2)])
def test_slices_by_a_rank_s_place_are_alike_on_one_axis_only(axes: tuple[str, str], left: int) -> None:
    """On rank 0 both begin at 0, on another rank one of them does not: ranks would not launch the same collectives."""
    draft = Draft()
    x = draft.input("x")
    sliced = [draft.call(aten.slice.Tensor, x, 0, 0, 2) for _ in axes]
    for node, axis in zip(sliced, axes, strict=True):
        node.meta["rank_axis"] = axis
    assert draft.merged(*map(draft.reduce, sliced)) == left


def test_the_same_value_is_reduced_once():
    draft = Draft()
    x = draft.input("x")
    assert draft.merged(draft.reduce(x), draft.reduce(x)) == 1


def test_equal_computations_lead_to_one_collective():
    draft = Draft()
    x = draft.input("x")
    ends = [draft.reduce(draft.call(aten.t.default, draft.call(aten.mul.Tensor, x, 2))) for _ in range(3)]
    assert draft.merged(*ends) == 1


def test_values_stay_what_they_were():
    draft = Draft()
    x, y = draft.input("x"), draft.input("y")
    ends = [draft.reduce(draft.call(aten.mul.Tensor, value, factor)) for value in (x, y, x) for factor in (2, 3, 2)]
    draft.graph.output(ends)
    inputs = [[torch.randn(4, 4), torch.randn(4, 4)] for _ in range(2)]
    before = run_lockstep([draft.graph] * 2, inputs, {"g": [[0, 1]]})
    notes = merge_identical_collectives(draft.graph)
    after = run_lockstep([draft.graph] * 2, inputs, {"g": [[0, 1]]})
    assert notes == ("5 collectives merged",)
    for rank in range(2):
        for ours, expected in zip(after[rank], before[rank], strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("other", [{"op": "avg"}, {"group": "h"}])
def test_another_group_or_reduction_is_another_collective(other: dict):
    draft = Draft()
    x = draft.input("x")
    assert draft.merged(draft.reduce(x), draft.reduce(x, **other)) == 2


def test_equal_numbers_of_other_types_differ():
    draft = Draft()
    x = draft.input("x")
    assert draft.merged(*(draft.reduce(draft.call(aten.add.Tensor, x, number)) for number in (1, 1.0, True))) == 3


def test_random_draws_are_never_shared():
    draft = Draft()
    ends = [draft.reduce(draft.call(aten.rand.default, [4, 4])) for _ in range(2)]
    assert draft.merged(*ends) == 2


def test_a_region_keeps_its_own_values():
    draft = Draft()
    x = draft.input("x")
    outside = draft.reduce(x)
    draft.region = 0
    inside = draft.reduce(x)
    again = draft.reduce(x)
    assert draft.merged(outside, inside, again) == 2


def test_what_is_not_communicated_is_left_alone():
    draft = Draft()
    x = draft.input("x")
    doubled = [draft.call(aten.mul.Tensor, x, 2) for _ in range(2)]
    draft.graph.output(doubled)
    assert merge_identical_collectives(draft.graph) == ()
    assert len(draft.graph.nodes) == 4
