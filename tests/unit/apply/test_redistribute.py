"""Every redistribution, run by all ranks in lockstep and compared with the full tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.redistribute import redistribute
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import local_shape
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.lockstep import one_group, run_lockstep
from tests.placements import P, R, S, cut, joined

SOURCES = [R, S(0), S(1), S(0, 2), S(1, 3), P]
EVEN = [(a, b) for a, b in itertools.product(SOURCES, SOURCES) if b != P or a == P]
SHARDS = [S(0), S(1)]
UNEVEN = [*((s, R) for s in SHARDS), *((R, s) for s in SHARDS), *((P, s) for s in SHARDS), (P, R)]


def axes_of(rank: int, *sizes: int) -> list[PlanAxis]:
    """The axes as ``rank`` sees them, the last one innermost; group ``k`` is axis ``k``'s."""
    axes = []
    for k, size in reversed(list(enumerate(sizes))):
        axes.append(PlanAxis(mesh_axes=(f"axis{k}",), size=size, rank=rank % size, group_name=str(k)))
        rank //= size
    return axes[::-1]


def joint_axes_of(rank: int, *sizes: int) -> list[PlanAxis]:
    """All ascending subsets of two or more axes as one; group ``"0,2"`` joins axes 0 and 2."""
    axes = axes_of(rank, *sizes)
    joint = []
    for count in range(2, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            size = math.prod(sizes[k] for k in chosen)
            place = 0
            for k in chosen:
                place = place * sizes[k] + axes[k].rank
            names = tuple(f"axis{k}" for k in chosen)
            joint.append(PlanAxis(mesh_axes=names, size=size, rank=place, group_name=",".join(map(str, chosen))))
    return joint


def groups_of(*sizes: int) -> dict[str, list[list[int]]]:
    """The ranks of every group of ``axes_of`` and ``joint_axes_of``."""
    ranks = range(math.prod(sizes))
    groups: dict[str, list[list[int]]] = {}
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            by_rest: dict[tuple[int, ...], list[int]] = {}
            for rank in ranks:
                rest = tuple(axis.rank for k, axis in enumerate(axes_of(rank, *sizes)) if k not in chosen)
                by_rest.setdefault(rest, []).append(rank)
            groups[",".join(map(str, chosen))] = list(by_rest.values())
    return groups


def graph_of(
    rank: int, full: Tensor, source: Placements, target: Placements, sizes: tuple[int, ...], joint: bool = False
) -> fx.Graph:
    axes = axes_of(rank, *sizes)
    joined_axes = joint_axes_of(rank, *sizes) if joint else []
    with FakeTensorMode() as mode:
        local = torch.empty(local_shape(full.shape, source, axes), dtype=full.dtype)
    emitter = GraphEmitter(mode)
    node = emitter.placeholder("x", local)
    emitter.graph.output([redistribute(emitter, node, full.shape, source, target, axes, joined_axes)])
    emitter.graph.lint()
    return emitter.graph


def moved(full: Tensor, source, target, size: int) -> list[Tensor]:
    graphs = [graph_of(rank, full, (source,), (target,), (size,)) for rank in range(size)]
    parts = cut(full, source, size)
    outputs = run_lockstep(graphs, [[part] for part in parts], one_group("0", size))
    for graph, (output,) in zip(graphs, outputs, strict=True):
        (end,) = [node for node in graph.nodes if node.op == "output"]
        assert end.args[0][0].meta["val"].shape == output.shape
    return [output for (output,) in outputs]


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


def test_a_scalar_is_reduced():
    check(torch.tensor(3.5), P, R, 3)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S(0), R, ["all_gather"]),
        (S(1), R, ["all_gather"]),
        (P, R, ["all_reduce"]),
        (P, S(0), ["reduce_scatter"]),
        (P, S(1, 3), ["reduce_scatter"]),
        (S(0), S(1), ["all_to_all"]),
        (S(0, 2), S(1), ["all_to_all"]),
        (S(0), S(0, 2), ["all_gather"]),
        (R, S(0, 2), []),
        (R, R, []),
    ],
    ids=str,
)
def test_it_takes_one_collective(source, target, expected: list[str]):
    graph = graph_of(0, torch.zeros(12, 18), (source,), (target,), (2,))
    assert [fxn.collective_kind(node) for node in fxn.collectives_of(graph)] == expected


def test_nothing_becomes_a_partial_sum():
    with pytest.raises(AssertionError, match="no collective"):
        graph_of(0, torch.zeros(4), (R,), (P,), (2,))


TWO = [R, S(0), S(1), P]


def transitions(placements: list, axes: int) -> list[tuple[Placements, Placements]]:
    """All pairs of placements over that many axes, but into partial sums."""
    sides = list(itertools.product(placements, repeat=axes))
    return [
        (source, target)
        for source, target in itertools.product(sides, sides)
        if all(b != P or a == P for a, b in zip(source, target, strict=True))
    ]


def check_mesh(source: Placements, target: Placements, sizes: tuple[int, ...], joint: bool) -> None:
    """The oracle cuts the full tensor by the outermost axis, then by the next."""
    full = torch.arange(8 * 24).reshape(8, 24)
    ranks = range(math.prod(sizes))
    graphs = [graph_of(rank, full, source, target, sizes, joint) for rank in ranks]
    results = run_lockstep(graphs, [[part] for part in nested(full, source, sizes)], groups_of(*sizes))
    outputs = [output for (output,) in results]
    torch.testing.assert_close(joined_mesh(outputs, target, full.shape, sizes), full)


@pytest.mark.parametrize("joint", [False, True], ids=["chained", "joint"])
@pytest.mark.parametrize(("source", "target"), transitions(TWO, 2), ids=str)
def test_two_axes(source: Placements, target: Placements, joint: bool):
    check_mesh(source, target, (2, 2), joint)


@pytest.mark.parametrize(("source", "target"), transitions(TWO, 3)[::23], ids=str)
def test_three_axes(source: Placements, target: Placements):
    check_mesh(source, target, (2, 2, 2), joint=True)


INNER_FIRST = (S(0, 2), S(0))  # the inner axis cuts first, as FSDP over tensor parallelism


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (INNER_FIRST, (R, S(0)), [("all_gather", "0")]),
        ((P, S(0)), INNER_FIRST, [("reduce_scatter", "0")]),
        ((P, P), (R, S(0)), [("reduce_scatter", "1"), ("all_reduce", "0")]),
        ((P, P), (R, R), [("all_reduce", "0,1")]),
        ((S(0), S(0)), (R, R), [("all_gather", "0,1")]),
        ((P, P), (S(0), S(0)), [("reduce_scatter", "0,1")]),
        ((S(0), S(0)), (R, S(0)), [("all_gather", "0,1")]),
        ((S(0), P), (S(0), S(1)), [("reduce_scatter", "1")]),
        (INNER_FIRST, (R, R), [("all_gather", "0"), ("all_gather", "1")]),
    ],
    ids=str,
)
def test_collectives_over_two_axes(source: Placements, target: Placements, expected: list[tuple[str, str]]):
    graph = graph_of(0, torch.zeros(8, 12), source, target, (2, 2), joint=True)
    assert [(fxn.collective_kind(node), fxn.group_of(node)) for node in fxn.collectives_of(graph)] == expected


def test_the_inner_axis_may_cut_first():
    """Rows 0..7 cut by the inner axis, and each half over the outer one: the outer gather gives contiguous halves."""
    full = torch.arange(8)[:, None] * torch.ones(1, 2)
    graphs = [graph_of(rank, full, INNER_FIRST, (R, S(0)), (2, 2)) for rank in range(4)]
    parts = [full[0:2], full[4:6], full[2:4], full[6:8]]
    outputs = [output for (output,) in run_lockstep(graphs, [[part] for part in parts], groups_of(2, 2))]
    for output, expected in zip(outputs, [full[:4], full[4:], full[:4], full[4:]], strict=True):
        torch.testing.assert_close(output, expected)


def test_a_dim_that_two_axes_cannot_share_is_refused():
    with pytest.raises(AssertionError, match="does not divide"):
        graph_of(0, torch.zeros(6, 2), (S(0), S(0)), (R, R), (2, 2))


def nested(full: Tensor, source: Placements, sizes: tuple[int, ...]) -> list[Tensor]:
    """The parts of all ranks, the last axis fastest; integers, so that sums of random addends are exact."""
    if not source:
        return [full]
    parts = []
    for outer in cut(full, source[0], sizes[0]):
        torch.manual_seed(0)  # what is replicated over the outer axis has the same addends there
        parts += nested(outer, source[1:], sizes[1:])
    return parts


def joined_mesh(parts: list[Tensor], target: Placements, shape: torch.Size, sizes: tuple[int, ...]) -> Tensor:
    """The full tensor that the parts of all ranks make."""
    if not target:
        return parts[0]
    inside = torch.Size(local_shape(shape, target[:1], axes_of(0, *sizes[:1])))
    count = len(parts) // sizes[0]
    outer = [joined_mesh(parts[i * count : (i + 1) * count], target[1:], inside, sizes[1:]) for i in range(sizes[0])]
    return joined(outer, target[0], shape)
