"""Chains of gathers become one; the oracle of values is the full tensor, that of groups the ranks they hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.fuse_chained_all_gathers import fuse_chained_all_gathers
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.lockstep import run_lockstep
from tests.support.placements import S
from tests.unit.passes.chains import Chains

aten = torch.ops.aten
SHAPE = torch.Size((12, 24, 6))
FULL = torch.randn(SHAPE)
MESH, SQUARE = Chains(2, 3), Chains(2, 2)


def groups_in(graph: fx.Graph) -> list[str]:
    return [fxn.group_of(node) for node in fxn.collectives_of(graph)]


def copies_in(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.clone.default))


def fused(mesh: Chains, full: torch.Tensor, source: Any, order: Sequence[int], join: Any) -> tuple[fx.Graph, fx.Graph]:
    """The graph before and after the pass, once all ranks have computed the full tensor with both."""
    before, after = (mesh.graph(full.shape, source, order) for _ in range(2))
    fuse_chained_all_gathers(after, join=join)
    after.lint()
    for graph in (before, after):
        for results in run_lockstep([graph] * mesh.world, mesh.shards(full, source), mesh.groups):
            assert torch.equal(results[0], full)
    for new, old in zip(_result(after), _result(before), strict=True):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
    return before, after


def _result(graph: fx.Graph) -> list[torch.Tensor]:
    return [node.meta["val"] for node in graph.output_node().args[0]]  # type: ignore[union-attr]


# What is cut where, the order of gathering, the group of the one gather, copies before and after.
CASES = [
    ((S(0), S(0)), (1, 0), "0,1", 0, 0),  # the inner axis first: the flattened mesh
    ((S(0), S(1)), (0, 1), "1,0", 1, 1),  # the outer first: reordered ranks
    ((S(1), S(0)), (1, 0), "0,1", 1, 1),
    ((S(0), S(0)), (0, 1), "0,1", 1, 0),  # the copy behind the chain undid the order
    ((S(1), S(1)), (0, 1), "0,1", 2, 1),
    ((S(1), S(1)), (1, 0), "0,1", 2, 1),
    ((S(2), S(1)), (0, 1), "1,0", 2, 1),
]


@pytest.mark.parametrize(("source", "order", "group", "copies", "copies_left"), CASES)
def test_two_gathers_become_one(source: Any, order: Any, group: str, copies: int, copies_left: int):
    before, after = fused(MESH, FULL, source, order, MESH.join)
    assert (groups_in(before), copies_in(before)) == ([str(k) for k in order], copies)
    assert (groups_in(after), copies_in(after)) == ([group], copies_left)


def test_one_gather_is_not_copied_where_the_chain_was_not():
    """Between the gathers a third of the value is copied; behind one gather it would be all of it."""
    for source, order in (((S(0), S(1)), (1, 0)), ((S(1), S(0)), (0, 1))):
        before, after = fused(MESH, FULL, source, order, MESH.join)
        assert groups_in(after) == groups_in(before) == [str(k) for k in order]


# Three axes: what is cut where, by the order of gathering the groups that are left. Where the last gather is of dim 0,
# nothing is copied behind it: what was copied between the gathers before keeps them apart.
ALL_ORDERS = list(itertools.permutations(range(3)))
THREE = {
    (S(0), S(0), S(0)): {order: ["0,1,2"] for order in ALL_ORDERS},
    (S(1), S(1), S(1)): {order: ["0,1,2"] for order in ALL_ORDERS},
    (S(0), S(1), S(0)): {order: ["1,0,2"] for order in ALL_ORDERS} | {(1, 2, 0): ["1", "0,2"], (2, 1, 0): ["1,2", "0"]},
}


@pytest.mark.parametrize("order", ALL_ORDERS)
def test_three_gathers_become_one(order: tuple[int, ...]):
    mesh, full = Chains(2, 2, 2), torch.randn(8, 8)
    for source, groups in THREE.items():
        before, after = fused(mesh, full, source, order, mesh.join)
        assert copies_in(after) <= copies_in(before)
        assert groups_in(after) == groups[order]


def test_the_flattened_groups_alone_do_what_they_can():
    _, after = fused(MESH, FULL, (S(0), S(1)), (0, 1), MESH.ascending)
    assert groups_in(after) == ["0,1"]  # one copy does both: the order of ranks and that of the dim
    mesh, full = Chains(2, 2, 2), torch.randn(8, 8, 8)
    known = lambda names: mesh.join(names) if list(names) == ["1", "2"] else None  # noqa: E731
    _, after = fused(mesh, full, (S(0), S(0), S(0)), (2, 1, 0), known)
    assert groups_in(after) == ["1,2", "0"]
    _, after = fused(mesh, full, (S(0), S(0), S(0)), (0, 2, 1), known)
    assert groups_in(after) == ["0", "1,2"]


def test_on_one_axis_the_report_says_so():
    graph = MESH.graph(SHAPE, (S(0), S(0)), (1, 0))
    assert fuse_chained_all_gathers(graph) == ("skipped: one axis",)
    assert len(groups_in(graph)) == 2


def test_the_report_counts():
    graph = MESH.graph(SHAPE, (S(0), S(0)), (1, 0))
    assert fuse_chained_all_gathers(graph, join=MESH.join) == ("1 chains fused, 1 gathers less",)
    assert fuse_chained_all_gathers(graph, join=MESH.join) == ()


class Draft(GraphEmitter):
    """A graph by hand of a (4, 6) shard on two axes of two ranks."""

    def __init__(self) -> None:
        super().__init__(FakeTensorMode())
        with self.fake_mode:
            self.x = self.placeholder("x", torch.empty(4, 6))

    def gather(self, node: fx.Node, axis: int) -> fx.Node:
        size = SQUARE.sizes[axis]
        return self.call(collectives.WAIT, self.call(collectives.ALL_GATHER, self.contiguous(node), size, str(axis)))

    def fused(self, *outputs: fx.Node, join: Any = SQUARE.join) -> list[str]:
        """Groups of the gathers left, once both graphs have made the same of random shards."""
        self.graph.output(list(outputs))
        shards = [[torch.randn(4, 6)] for _ in range(SQUARE.world)]
        expected = run_lockstep([self.graph] * SQUARE.world, shards, SQUARE.groups)
        fuse_chained_all_gathers(self.graph, join=join)
        self.graph.lint()
        for ours, wanted in zip(
            run_lockstep([self.graph] * SQUARE.world, shards, SQUARE.groups), expected, strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
        return groups_in(self.graph)


IDENTITIES = {
    "none": [],
    "view": [(aten.view.default, [2, 24])],
    "two transposes": [(aten.t.default,), (aten.t.default,)],
    "there and back": [
        (aten.view.default, [2, 4, 6]),
        (aten.permute.default, [2, 0, 1]),
        (aten.permute.default, [1, 2, 0]),
    ],
    "a slice of all": [(aten.slice.Tensor, 0, 0, 100)],
    "a dim more": [(aten.unsqueeze.default, 1), (aten.transpose.int, 0, 1)],
    "a copy": [(aten.clone.default,)],
}
MOVES = {
    "a transpose": [(aten.t.default,)],
    "the first rows": [(aten.slice.Tensor, 0, 0, 4)],
    "the last rows": [(aten.slice.Tensor, 0, 4, 8)],
    "every second row": [(aten.slice.Tensor, 0, 0, 8, 2)],
    "one row": [(aten.select.int, 0, 0)],
    "rows repeated": [(aten.unsqueeze.default, 0), (aten.expand.default, [3, 8, 6])],
    "another value": [(aten.neg.default,)],
    "another dtype": [(aten.view.dtype, torch.int32)],
}


@pytest.mark.parametrize("axes", [(1, 0), (0, 1)])
@pytest.mark.parametrize("views", IDENTITIES.values(), ids=IDENTITIES)
def test_views_that_change_nothing_are_looked_through(views: list[Any], axes: tuple[int, int]):
    draft = Draft()
    first, second = axes
    node = draft.gather(draft.x, first)
    for target, *args in views:
        node = draft.call(target, node, *args)
    assert draft.fused(draft.gather(node, second)) == [f"{second},{first}"]


@pytest.mark.parametrize("views", MOVES.values(), ids=MOVES)
def test_what_changes_something_keeps_its_gathers(views: list[Any]):
    draft = Draft()
    node = draft.gather(draft.x, 0)
    for target, *args in views:
        node = draft.call(target, node, *args)
    assert draft.fused(draft.gather(node, 1)) == ["0", "1"]


def test_a_value_that_others_read_too_stays():
    for where in range(2):
        draft = Draft()
        wait = draft.gather(draft.x, 0)
        view = draft.call(aten.view.default, wait, [2, 24])
        other = draft.call(aten.neg.default, (wait, view)[where])
        assert draft.fused(draft.gather(view, 1), other) == ["0", "1"]


def test_the_result_may_have_many_readers():
    draft = Draft()
    whole = draft.gather(draft.gather(draft.x, 0), 1)
    assert draft.fused(draft.call(aten.neg.default, whole), draft.call(aten.t.default, whole), whole) == ["1,0"]


def test_without_a_group_in_its_order_a_chain_stays():
    draft = Draft()
    asked: list[list[str]] = []

    def join(names: Sequence[str]) -> PlanAxis | None:
        asked.append(list(names))
        return SQUARE.ascending(names)

    assert draft.fused(draft.gather(draft.gather(draft.x, 0), 1), join=join) == ["0", "1"]
    assert asked == [["1", "0"]]


def test_the_gather_belongs_to_what_reads_it_and_keeps_marks():
    draft = Draft()
    first = draft.gather(draft.x, 0)
    second = draft.gather(first, 1)
    for node, meta in ((first, {"collective_role": "parameter_gather"}), (second, {"custom": {"module": "a"}})):
        node.args[0].meta.update(meta)  # type: ignore[union-attr]
    draft.fused(second)
    (gather,) = fxn.collectives_of(draft.graph)
    assert fxn.collective_role(gather) == fxn.PARAMETER_GATHER and fxn.custom(gather, "module") == "a"
    assert gather.meta["val"].shape == (16, 6)
