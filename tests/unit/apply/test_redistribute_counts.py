"""How many collectives a redistribution takes, against DTensor's own; nothing is sent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial

from lightning_autoparallel.apply.group_choice import Groups, WarnOnce
from lightning_autoparallel.apply.redistribution_steps import COLLECTIVES, plan_steps
from lightning_autoparallel.cost.placement import redistribution_kind
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import explicit
from tests.support.placements import AVG, MAX, MIN, P, R, S
from tests.support.redistributions import (
    INNER_FIRST,
    Pair,
    axes_of,
    graph_of_all,
    is_local,
    joint_axes_of,
    ordered_by,
    pairs_over,
)
from tests.support.stock import StockCounts

SHAPE = (16, 24)


def planned(pair: Pair, groups: Groups) -> int:
    source, target = (explicit(side, groups.axes) for side in pair)
    return sum(step.kind in COLLECTIVES for step in plan_steps(SHAPE, source, target, groups))


def launched(pair: Pair, *sizes: int, joint: bool = True, ordered: bool = False) -> list[tuple[str, str]]:
    """Kind and group of every collective in the graph of rank 0."""
    emitted = graph(pair, *sizes, joint=joint, ordered=ordered)
    return [(fxn.collective_kind(node), fxn.group_of(node)) for node in fxn.collectives_of(emitted)]


def graph(pair: Pair, *sizes: int, joint: bool = True, ordered: bool = False) -> fx.Graph:
    joint_axes = joint_axes_of(0, *sizes) if joint else []
    return graph_of_all([pair], SHAPE, axes_of(0, *sizes), joint_axes, ordered_by(0, *sizes) if ordered else None)


@pytest.mark.parametrize("axes", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_never_more_collectives_than_dtensor(axes: int, fake_mesh):
    """Every pair of the table: DTensor with flattened meshes and without them, whichever takes fewer."""
    names = ("dp_replicate", "dp_shard", "tp")[-axes:]
    stock = StockCounts(fake_mesh(**dict.fromkeys(names, 2)).device_mesh, SHAPE)
    groups = Groups(axes_of(0, *[2] * axes), joint_axes_of(0, *[2] * axes))
    compared = fewer = 0
    more = []
    for pair in pairs_over(axes):
        ours, theirs = planned(pair, groups), stock.fewest(*pair)
        assert (ours == 0) == is_local(pair, groups.axes) or pair_of_sums(pair), pair
        if theirs is None:
            continue
        compared += 1
        fewer += ours < theirs
        if ours > theirs:
            more.append(f"{pair[0]} -> {pair[1]}: {ours}, DTensor {theirs}")
    assert not more, f"{len(more)} of {compared}:\n" + "\n".join(more[:20])
    assert fewer


def pair_of_sums(pair: Pair) -> bool:
    """Sums become averages by scaling."""
    return any({a, b} == {P, AVG} for a, b in zip(*pair, strict=True))


def test_the_graph_has_the_collectives_that_were_planned():
    pairs = pairs_over(2)
    axes, joint = axes_of(0, 2, 2), joint_axes_of(0, 2, 2)
    emitted = graph_of_all(pairs, SHAPE, axes, joint)
    assert len(list(fxn.collectives_of(emitted))) == sum(planned(pair, Groups(axes, joint)) for pair in pairs)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S(0), R, ["all_gather"]),
        (S(1), R, ["all_gather"]),
        (P, R, ["all_reduce"]),
        (AVG, R, ["all_reduce"]),
        (P, S(0), ["reduce_scatter"]),
        (P, S(1, 3), ["reduce_scatter"]),
        (S(0), S(1), ["all_to_all"]),
        (S(0, 2), S(1), ["all_to_all"]),
        (S(0), S(0, 2), ["all_gather"]),
        (R, S(0, 2), []),
        (R, R, []),
        (R, P, []),
        (P, AVG, []),
    ],
    ids=str,
)
def test_over_one_axis(source, target, expected: list[str]):
    assert [kind for kind, _ in launched(((source,), (target,)), 2)] == expected


def test_what_plans_price_is_what_is_launched():
    """On one axis the kind of a move, by which plans price it, is that of the graph's collective, or there is none."""
    priced = {
        (source, target): redistribution_kind(source, target)
        for (source,), (target,) in pairs_over(1)
        if not isinstance(target, Partial)
    }
    kinds = {pair: [kind for kind, _ in launched(tuple((side,) for side in pair), 2)] for pair in priced}
    assert kinds == {pair: [] if kind in (None, "slice") else [kind] for pair, kind in priced.items()}
    assert {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", None} == set(priced.values())


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (INNER_FIRST, (R, S(0)), [("all_gather", "0")]),
        ((P, S(0)), INNER_FIRST, [("reduce_scatter", "0")]),
        ((P, P), (R, S(0)), [("reduce_scatter", "1"), ("all_reduce", "0")]),
        ((P, P), (R, R), [("all_reduce", "0,1")]),
        ((P, AVG), (R, R), [("all_reduce", "0,1")]),
        ((S(0), S(0)), (R, R), [("all_gather", "0,1")]),
        ((S(0), S(1)), (R, R), [("all_gather", "0,1")]),
        ((P, P), (S(0), S(0)), [("reduce_scatter", "0,1")]),
        ((AVG, P), (S(0), S(0)), [("reduce_scatter", "0,1")]),
        ((S(0), S(0)), (R, S(0)), [("all_gather", "0,1")]),
        ((S(0), P), (S(0), S(1)), [("reduce_scatter", "1")]),
        ((S(0), S(0)), (S(1), S(1)), [("all_to_all", "0"), ("all_to_all", "1")]),
        ((MAX, MAX), (R, R), [("all_reduce", "1"), ("all_reduce", "0")]),
        ((MIN, MIN), (S(0), S(0)), [("reduce_scatter", "0"), ("reduce_scatter", "1")]),
        ((MAX, P), (R, R), [("all_reduce", "1"), ("all_reduce", "0")]),
        ((AVG, MIN), (R, R), [("all_reduce", "1"), ("all_reduce", "0")]),
    ],
    ids=str,
)
def test_over_two_axes(source, target, expected: list[tuple[str, str]]):
    assert launched((source, target), 2, 2) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((P, P, P), (R, S(0), R), [("reduce_scatter", "1"), ("all_reduce", "0,2")]),
        ((P, AVG, P), (R, S(1), R), [("reduce_scatter", "1"), ("all_reduce", "0,2")]),
        ((S(0), P, S(0)), (R, R, R), [("all_reduce", "1"), ("all_gather", "0,2")]),
        ((P, S(0), P), (S(1), S(0), S(1)), [("reduce_scatter", "0,2")]),
        ((S(0), S(0), S(0)), (R, R, R), [("all_gather", "0,1,2")]),
        ((P, MAX, P), (R, R, R), [("all_reduce", "2"), ("all_reduce", "1"), ("all_reduce", "0")]),
        ((MAX, P, AVG), (R, R, R), [("all_reduce", "1,2"), ("all_reduce", "0")]),
    ],
    ids=str,
)
def test_alike_collectives_merge_across_others(source, target, expected: list[tuple[str, str]]):
    """What makes the tensor smaller first: the all-reduce is of the small one."""
    assert launched((source, target), 2, 2, 2) == expected


def test_a_mixed_reduction_is_scaled_once():
    nodes = graph(((P, AVG, AVG), (R, R, R)), 2, 2, 3).nodes
    assert [node.args[1] for node in nodes if node.target is torch.ops.aten.div.Scalar] == [6]


ORDERED = [
    ((INNER_FIRST, (R, R)), "1,0"),
    (((P, P), INNER_FIRST), "1,0"),
    (((S(1, 2), S(1)), (R, R)), "0,1"),  # parts of dim 1 are copied into place whatever their order
    (((S(0), S(0)), (R, R)), "0,1"),
]


@pytest.mark.parametrize(("pair", "group"), ORDERED, ids=str)
def test_an_order_of_its_own_where_it_saves_a_copy(pair: Pair, group: str):
    ((_, chosen),) = launched(pair, 2, 2, ordered=True)
    assert chosen == group
    assert [name for _, name in launched(pair, 2, 2)] == ["0,1"]
    copies = {
        ordered: sum(node.target is torch.ops.aten.permute.default for node in graph(pair, 2, 2, ordered=ordered).nodes)
        for ordered in (False, True)
    }
    assert copies[True] == copies[False] - (group == "1,0")


def test_without_joint_groups_collectives_are_chained():
    assert launched(((S(0), S(0)), (R, R)), 2, 2, joint=False) == [("all_gather", "1"), ("all_gather", "0")]
    assert launched(((P, P), (S(0), S(0))), 2, 2, joint=False) == [("reduce_scatter", "0"), ("reduce_scatter", "1")]
    assert launched(((P, P), (R, R)), 2, 2, joint=False) == [("all_reduce", "0"), ("all_reduce", "1")]


def test_a_mesh_without_joint_groups_warns_once_per_shape():
    told: list[str] = []
    missing = WarnOnce(told.append)
    for sizes in [(2, 2), (2, 4), (2, 2)]:
        groups = Groups(axes_of(0, *sizes), missing=missing)
        for source in ((P, P), (S(0), S(0))):
            assert planned((source, (R, R)), groups) == 2
        assert planned(((P, S(0)), (R, S(0))), groups) == 1
    assert len(told) == 2
    assert "axis0: 2 x axis1: 4" in told[1] and "flatten the axes" in told[1]
    WarnOnce(told.append)(axes_of(0, 2, 2))
    assert len(told) == 3  # nothing is remembered but by who warned


def test_what_is_launched_is_as_large_as_it_must_be():
    """(P, P, P) -> (R, S(0), R): the reduce-scatter of everything, then the all-reduce of half of it."""
    emitted = graph(((P, P, P), (R, S(0), R)), 2, 2, 2)
    sizes = [fxn.collective_size_bytes(node) for node in fxn.collectives_of(emitted)]
    assert sizes == [math.prod(SHAPE) * 8, math.prod(SHAPE) * 4]
