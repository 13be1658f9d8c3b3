"""Dims that several axes cut unevenly: which collectives, which calls, and orders that the table has not."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import fx

from lightning_autoparallel.apply.group_choice import Groups
from lightning_autoparallel.apply.redistribution_steps import COLLECTIVES, plan_steps
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import explicit, nested_shards
from tests.support.lockstep import run_lockstep
from tests.support.placements import AVG, P, R, S
from tests.support.redistributions import (
    INNER_FIRST,
    Pair,
    axes_of,
    check_all,
    graph_of_all,
    groups_of,
    joint_axes_of,
    ordered_by,
    pairs_over,
    sources_of,
)
from tests.support.stock import StockCounts
from tests.support.uneven import nested_joined_from_all, nested_parts_of_all

NAMES = ("dp_replicate", "dp_shard", "tp")
LOOK_UP = torch.ops.aten.index_select.default


def graph(pairs: list[Pair], shape: tuple[int, ...], *sizes: int, rank: int = 0, joint: bool = True) -> fx.Graph:
    joint_axes = joint_axes_of(rank, *sizes) if joint else []
    return graph_of_all(pairs, shape, axes_of(rank, *sizes), joint_axes)


def check(pairs: list[Pair], shape: tuple[int, ...], *sizes: int, joint: bool = True, ordered: bool = False) -> None:
    full = torch.randn(shape, dtype=torch.float64)
    graphs = []
    for rank in range(torch.Size(sizes).numel()):
        joint_axes = joint_axes_of(rank, *sizes) if joint else []
        order = ordered_by(rank, *sizes) if ordered else None
        graphs.append(graph_of_all(pairs, shape, axes_of(rank, *sizes), joint_axes, order))
    inputs = list(zip(*(nested_parts_of_all(full, source, sizes) for source in sources_of(pairs)), strict=True))
    outputs = run_lockstep(graphs, inputs, groups_of(*sizes))
    check_all(pairs, outputs, full, sizes, nested_joined_from_all)


def launched(pair: Pair, shape: tuple[int, ...], *sizes: int, joint: bool = True) -> list[tuple[str, str]]:
    emitted = graph([pair], shape, *sizes, joint=joint)
    return [(fxn.collective_kind(node), fxn.group_of(node)) for node in fxn.collectives_of(emitted)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((S(0), S(0)), (R, R), [("all_gather", "0,1")]),
        ((S(0), S(0)), (S(0), R), [("all_gather", "1")]),
        ((S(0), S(0)), (R, S(0)), [("all_gather", "0,1")]),
        ((S(0), S(0)), (S(1), R), [("all_gather", "1"), ("all_to_all", "0")]),
        ((P, AVG), (S(0), S(0)), [("reduce_scatter", "0,1")]),
        ((S(0), P), (S(0), S(0)), [("reduce_scatter", "1")]),
        ((R, P), (S(0), S(0)), [("reduce_scatter", "1")]),
        ((S(0), R), (S(0), S(0)), []),
        (INNER_FIRST, (R, R), [("all_gather", "0,1")]),
        (INNER_FIRST, (R, S(0)), [("all_gather", "0")]),
        ((S(0), S(0)), INNER_FIRST, [("all_gather", "0,1")]),
    ],
    ids=str,
)
def test_one_collective_on_joined_axes(source, target, expected: list[tuple[str, str]]):
    assert launched((source, target), (5, 7), 2, 2) == expected
    check([(source, target)], (5, 7), 2, 2)


def test_without_joint_groups_inner_cuts_are_undone_first():
    shape = (5, 7)
    assert launched(((S(0), S(0)), (R, R)), shape, 2, 2, joint=False) == [("all_gather", "1"), ("all_gather", "0")]
    assert launched((INNER_FIRST, (R, R)), shape, 2, 2, joint=False) == [("all_gather", "0"), ("all_gather", "1")]
    mixed: Pair = ((P, P, P), (S(0, 2), S(1), S(0)))  # axis 2 cuts first
    assert [name for _, name in launched(mixed, shape, 2, 2, 2, joint=False)] == ["1", "2", "0"]
    check([mixed, (mixed[1], (R, R, R))], shape, 2, 2, 2, joint=False)


@pytest.mark.parametrize("joint", [False, True], ids=["chained", "joint"])
@pytest.mark.parametrize(("shape", "sizes"), [((5, 11), (2, 3)), ((7, 4), (3, 2)), ((2, 1), (2, 2))], ids=str)
def test_axes_of_different_sizes(shape: tuple[int, int], sizes: tuple[int, int], joint: bool):
    check(pairs_over(2)[::5], shape, *sizes, joint=joint)


@pytest.mark.parametrize("ordered", [False, True], ids=["mesh order", "ordered groups"])
def test_axes_may_cut_in_any_order(ordered: bool):
    """All orders of two or three axes on dim 0 of 13 rows, to each other; chunks of 13 rows are 2, 2, 2, 1, ..."""
    axes = axes_of(0, 2, 2, 2)
    ends = [nested_shards(0, order, axes) for count in (2, 3) for order in itertools.permutations(range(3), count)]
    pairs = [pair for pair in itertools.product(ends, ends) if pair[0] != pair[1]]
    check(random.Random(0).sample(pairs, 25), (13, 3), 2, 2, 2, ordered=ordered)


@pytest.mark.parametrize("rows", [4, 7, 3, 1])
def test_nothing_is_looked_up_where_even_parts_hold_the_chunks(rows: int):
    """7 rows over 2 x 2 are 2, 2, 2, 1: what is left of 8 padded rows."""
    emitted = graph([((S(0), S(0)), (R, R)), ((P, P), (S(0), S(0)))], (rows, 2), 2, 2)
    assert not [node for node in emitted.nodes if node.target is LOOK_UP]
    assert [node for node in graph([((S(0), S(0)), (R, R))], (5, 2), 2, 2).nodes if node.target is LOOK_UP]


def test_ranks_have_the_same_calls_of_the_same_shapes():
    """Also where they have different numbers of rows."""
    described = set()
    for rank in range(8):
        emitted = graph(pairs_over(3)[::331], (5, 7), 2, 2, 2, rank=rank)
        shapes = [tuple(node.meta["val"].shape) for node in emitted.nodes if node.op == "call_function"]
        described.add((tuple(str(node.target) for node in emitted.nodes), tuple(shapes)))
    assert len(described) == 1


def test_replicas_of_merged_reductions_are_equal():
    """Float32 addends in any other order on one replica would show; the last axis replicates the chunks."""
    full = torch.randn(37, 5)
    pair: Pair = ((P, AVG, P), (S(0), S(0), R))
    graphs = [
        graph_of_all([pair], full.shape, axes_of(r, 2, 2, 2), joint_axes_of(r, 2, 2, 2), dtype=full.dtype)
        for r in range(8)
    ]
    inputs = [[part] for part in nested_parts_of_all(full, pair[0], (2, 2, 2))]
    outputs = [output for (output,) in run_lockstep(graphs, inputs, groups_of(2, 2, 2))]
    for rank in range(0, 8, 2):
        assert torch.equal(outputs[rank], outputs[rank + 1])


@pytest.mark.parametrize("shape", [(5, 7), (12, 16)], ids=str)
@pytest.mark.parametrize("axes", [2, 3])
def test_never_more_collectives_than_dtensor(axes: int, shape: tuple[int, int], fake_mesh):
    pairs = pairs_over(axes)
    check_counts(pairs if axes == 2 else random.Random(2).sample(pairs, 1000), axes, shape, fake_mesh)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(5, 7), (12, 16), (3, 24), (1, 1)], ids=str)
@pytest.mark.parametrize("axes", [2, 3])
def test_never_more_collectives_than_dtensor_for_any_pair(axes: int, shape: tuple[int, int], fake_mesh):
    check_counts(pairs_over(axes), axes, shape, fake_mesh)


def check_counts(pairs: list[Pair], axes: int, shape: tuple[int, int], fake_mesh) -> None:
    """DTensor's wrong flattened collectives are counted as well: that makes its count smaller, not larger."""
    stock = StockCounts(fake_mesh(**dict.fromkeys(NAMES[-axes:], 2)).device_mesh, shape)
    groups = Groups(axes_of(0, *[2] * axes), joint_axes_of(0, *[2] * axes))
    fewer, more = 0, []
    for pair in pairs:
        steps = plan_steps(shape, *(explicit(side, groups.axes) for side in pair), groups)
        ours, theirs = sum(step.kind in COLLECTIVES for step in steps), stock.fewest(*pair)
        if theirs is not None:
            fewer += ours < theirs
            more += [f"{pair[0]} -> {pair[1]}: {ours}, DTensor {theirs}"] if ours > theirs else []
    assert not more, "\n".join(more[:20])
    assert fewer
