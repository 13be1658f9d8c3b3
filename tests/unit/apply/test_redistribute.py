"""Every redistribution, run by all ranks in lockstep and compared with the full tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import Placements
from lightning_autoparallel.fx import nodes as fxn
from tests.support.lockstep import one_group, run_lockstep
from tests.support.placements import AVG, MAX, MIN, P, R, S, cut, joined
from tests.support.redistributions import (
    INNER_FIRST,
    axes_of,
    check_all,
    graph_of_all,
    groups_of,
    joint_axes_of,
    ordered_by,
    pairs_over,
    parts_of_all,
)

SOURCES = [R, S(0), S(1), S(0, 2), S(1, 3), P]
EVEN = [(a, b) for a, b in itertools.product(SOURCES, SOURCES) if b != P or a == P]
SHARDS = [S(0), S(1)]
UNEVEN = [
    *((s, R) for s in SHARDS),
    *((R, s) for s in SHARDS),
    *((P, s) for s in SHARDS),
    *((AVG, s) for s in SHARDS),
    (P, R),
    (S(0), S(1)),
    (S(1), S(0)),
]


def graph_of(
    rank: int, full: Tensor, source: Placements, target: Placements, sizes: tuple[int, ...], joint: bool = False
) -> fx.Graph:
    joint_axes = joint_axes_of(rank, *sizes) if joint else []
    return graph_of_all([(source, target)], full.shape, axes_of(rank, *sizes), joint_axes, dtype=full.dtype)


def moved(full: Tensor, source, target, size: int) -> list[Tensor]:
    graphs = [graph_of(rank, full, (source,), (target,), (size,)) for rank in range(size)]
    parts = cut(full, source, size)
    outputs = run_lockstep(graphs, [[part] for part in parts], one_group("0", size))
    for graph, (output,) in zip(graphs, outputs, strict=True):
        (end,) = [node for node in graph.nodes if node.op == "output"]
        assert end.args[0][0].meta["val"].shape == output.shape
    return [output for (output,) in outputs]


@pytest.mark.parametrize("size", [4, 3], ids=["slices", "padded"])
def test_calls_by_a_rank_s_place_say_on_which_axis(size: int) -> None:
    """Their numbers are equal on some ranks only."""
    for rank in range(4):
        axes = axes_of(rank, 2, 2)
        pairs = [((R, R), (S(0), R)), ((R, R), (R, S(0)))]
        graph = graph_of_all(pairs, (size, 2), axes, [], dtype=torch.float32)
        said = [axis for node in graph.nodes if (axis := fxn.rank_axis(node)) is not None]
        assert said == [axis.name for axis in axes]


def check(full: Tensor, source, target, size: int) -> None:
    result = moved(full, source, target, size)
    torch.testing.assert_close(joined(result, target, full.shape), full)
    if target != P:
        for ours, expected in zip(result, cut(full, target, size), strict=True):
            assert ours.shape == expected.shape


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("source", "target"), EVEN, ids=str)
def test_even(source, target, size: int):
    check(torch.randn(12, 18, 5), source, target, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 7), (1, 10), (7, 1)])
@pytest.mark.parametrize(("source", "target"), UNEVEN, ids=str)
def test_uneven_shards_are_padded(source, target, shape: tuple[int, int], size: int):
    check(torch.randn(shape), source, target, size)


@pytest.mark.parametrize(("source", "target"), [(S(0), R), (R, S(0)), (P, S(0)), (P, R)], ids=str)
@pytest.mark.parametrize("rows", [4, 5])
def test_vectors_and_integers(source, target, rows: int):
    check(torch.arange(rows), source, target, 2)


@pytest.mark.parametrize("source", [P, AVG, MAX, MIN], ids=str)
def test_a_scalar_is_reduced(source):
    check(torch.tensor(3.5), source, R, 3)


@pytest.mark.parametrize("target", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize("source", [AVG, MAX, MIN], ids=str)
def test_averages_maxima_and_minima(source, target):
    check(torch.randn(6, 9), source, target, 3)


@pytest.mark.parametrize("target", [P, AVG, MAX, MIN], ids=str)
@pytest.mark.parametrize("source", [R, S(0), P, AVG], ids=str)
def test_into_partial_values(source, target):
    check(torch.randn(6, 9), source, target, 3)


def test_whole_numbers_have_no_average():
    with pytest.raises(AssertionError, match="int64 values have no average"):
        graph_of(0, torch.zeros(4, dtype=torch.int64), (AVG,), (R,), (2,))


# Two uneven dims, each cut by one axis; and a dim that does not divide beside one that both axes cut.
UNEVEN_MESH = [
    ((S(0), S(1)), (R, R)),
    ((P, P), (S(0), S(1))),
    ((P, AVG), (S(1), S(0))),
    ((S(0), S(1)), (R, S(0))),
    ((S(1), P), (S(0), R)),
    ((R, S(1)), (S(0), S(1))),
]


@pytest.mark.parametrize("joint", [False, True], ids=["chained", "joint"])
def test_uneven_dims_that_different_axes_cut(joint: bool):
    full = torch.randn(5, 7, dtype=torch.float64)
    check_mesh(UNEVEN_MESH, full, (2, 3), joint)


def check_mesh(pairs, full: Tensor, sizes: tuple[int, ...], joint: bool, ordered: bool = False) -> None:
    """The oracle cuts the full tensor by the outermost axis, then by the next."""
    ranks = range(torch.Size(sizes).numel())
    graphs = [
        graph_of_all(
            pairs,
            full.shape,
            axes_of(rank, *sizes),
            joint_axes_of(rank, *sizes) if joint else [],
            ordered_by(rank, *sizes) if ordered else None,
        )
        for rank in ranks
    ]
    sources = dict.fromkeys(source for source, _ in pairs)
    inputs = list(zip(*(parts_of_all(full, source, sizes) for source in sources), strict=True))
    check_all(pairs, run_lockstep(graphs, inputs, groups_of(*sizes)), full, sizes)


def test_all_pairs_on_two_axes_chained():
    """With joint groups: see ``test_redistribute_values``."""
    check_mesh(pairs_over(2), torch.randn(8, 12, dtype=torch.float64), (2, 2), joint=False)


def test_axes_of_different_sizes():
    check_mesh(pairs_over(2)[::7], torch.randn(12, 18, dtype=torch.float64), (2, 3), joint=True)


def test_all_elements_of_a_vector_may_be_cut_twice():
    pairs = [((S(0), S(0)), (R, R)), ((R, P), (S(0), S(0))), ((S(0), S(0)), (R, S(0))), ((P, S(0)), (S(0), R))]
    check_mesh(pairs, torch.randn(4, dtype=torch.float64), (2, 2), joint=True)


# Orders of cuts on one dim: the inner axis first, an uncut axis between, blocks that no axis cuts.
INTERLEAVED = [
    INNER_FIRST,
    (S(0), S(0)),
    (S(1, 2), S(1)),
    (S(0, 2), R),
    (R, S(0, 4)),
    (S(0, 3), S(1)),
    (S(1, 2), S(0, 2)),
]


@pytest.mark.parametrize("ordered", [False, True], ids=["mesh order", "ordered groups"])
def test_shards_keep_their_order(ordered: bool):
    ends = [*INTERLEAVED, (R, R), (R, S(0)), (S(0), R), (P, AVG)]
    pairs = [(a, b) for a, b in itertools.product(ends, ends) if not {P, AVG} & set(b)]
    check_mesh(pairs, torch.randn(24, 48, dtype=torch.float64), (2, 2), joint=True, ordered=ordered)


def test_the_inner_axis_may_cut_first():
    """Rows 0..7 cut by the inner axis, and each half over the outer one: the outer gather gives contiguous halves."""
    full = torch.arange(8)[:, None] * torch.ones(1, 2)
    graphs = [graph_of(rank, full, INNER_FIRST, (R, S(0)), (2, 2)) for rank in range(4)]
    parts = [full[0:2], full[4:6], full[2:4], full[6:8]]
    outputs = [output for (output,) in run_lockstep(graphs, [[part] for part in parts], groups_of(2, 2))]
    for output, expected in zip(outputs, [full[:4], full[4:], full[:4], full[4:]], strict=True):
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("placements", [(S(0, 2), R), (R, S(0, 4)), (S(0), S(0, 4))], ids=str)
def test_uneven_blocks_are_refused(placements: Placements):
    """Nested chunks need not be even (``test_redistribute_uneven``); what lies between blocks must be."""
    for source, target in [(placements, (R, R)), ((S(0), S(0)), placements)]:
        with pytest.raises(AssertionError, match="does not divide"):
            graph_of(0, torch.zeros(5, 2), source, target, (2, 2))


@pytest.mark.parametrize("outer", [P, MAX], ids=str)
@pytest.mark.parametrize("inner", [MAX, MIN, AVG], ids=str)
def test_mixed_partial_values_are_reduced_from_the_inside(outer, inner):
    """A sum over the outer axis of maxima over the inner one is no maximum of sums."""
    check_mesh([((outer, inner), (R, R))], torch.randn(4, 6, dtype=torch.float64), (2, 2), joint=True)


def test_an_outer_partial_value_waits_for_another_kind_inside():
    with pytest.raises(AssertionError, match="no collective turns"):
        graph_of(0, torch.zeros(4, 4), (P, MAX), (R, MAX), (2, 2))


def test_a_merged_reduction_is_the_same_on_all_replicas():
    """Random float32 addends: any other order of additions on one rank would show."""
    full = torch.randn(64, 64)
    graphs = [graph_of(rank, full, (P, AVG, P), (R, S(0), R), (2, 2, 2), joint=True) for rank in range(8)]
    inputs = [[part] for part in parts_of_all(full, (P, AVG, P), (2, 2, 2))]
    outputs = [output for (output,) in run_lockstep(graphs, inputs, groups_of(2, 2, 2))]
    for rank in range(8):
        assert torch.equal(outputs[rank], outputs[rank & 0b010])
