"""Every redistribution, run by all ranks in lockstep and compared with the full tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.redistribute import local_shape, redistribute
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx import nodes as fxn
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


def graph_of(rank: int, full: Tensor, source: Placements, target: Placements, sizes: tuple[int, ...]) -> fx.Graph:
    axes = axes_of(rank, *sizes)
    with FakeTensorMode() as mode:
        local = torch.empty(local_shape(full.shape, source, axes), dtype=full.dtype)
    emitter = GraphEmitter(mode)
    node = emitter.placeholder("x", local)
    emitter.graph.output([redistribute(emitter, node, full.shape, source, target, axes)])
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


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (source, target)
        for source, target in itertools.product(itertools.product(TWO, TWO), repeat=2)
        if all(b != P or a == P for a, b in zip(source, target, strict=True))
    ],
    ids=str,
)
def test_two_axes(source: Placements, target: Placements):
    """Nested placements over a 2 x 2 mesh, the oracle cutting the full tensor by the outer axis, then by the inner."""
    full = torch.arange(96).reshape(8, 12)
    graphs = [graph_of(rank, full, source, target, (2, 2)) for rank in range(4)]
    groups = {"0": [[0, 2], [1, 3]], "1": [[0, 1], [2, 3]]}
    results = [output for (output,) in run_lockstep(graphs, [[part] for part in nested(full, source)], groups)]
    outer_shape = torch.Size(local_shape(full.shape, (target[0],), axes_of(0, 2)))
    outer = [joined(results[:2], target[1], outer_shape), joined(results[2:], target[1], outer_shape)]
    torch.testing.assert_close(joined(outer, target[0], full.shape), full)


def nested(full: Tensor, source: Placements) -> list[Tensor]:
    """The parts of ranks (0, 0), (0, 1), (1, 0), (1, 1); integers, so that sums of random addends are exact."""
    parts = []
    for outer in cut(full, source[0], 2):
        torch.manual_seed(0)  # what is replicated over the outer axis has the same addends there
        parts += cut(outer, source[1], 2)
    return parts
