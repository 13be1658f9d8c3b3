"""Rows put into nested chunks and back, run on tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.nested import NestedChunks
from lightning_autoparallel.fx.chunk_rows import nested_chunk
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode

CASES = [
    (rows, padded, counts)
    for counts in [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
    for padded in (1, 3, 5, 6, 13)
    for rows in {padded, padded - 1, 0}  # what a rank with fewer rows than the others has
]


def nested(rows: int, padded: int, counts: tuple[int, ...]) -> NestedChunks:
    return NestedChunks(rows=rows, padded_rows=padded, counts=counts, part=math.ceil(padded / math.prod(counts)))


def graph_of(call: str, case: tuple[int, int, tuple[int, ...]]) -> fx.GraphModule:
    """``separate`` or ``join`` along dim 1."""
    chunks = nested(*case)
    size = chunks.padded_rows if call == "separate" else chunks.part * math.prod(chunks.counts)
    mode = FakeTensorMode()
    emitter = GraphEmitter(mode)
    with mode:
        value = torch.empty(2, size)
    emitter.graph.output([getattr(chunks, call)(emitter, emitter.placeholder("x", value), 1)])
    return fx.GraphModule(nn.Module(), emitter.graph)


def sample(columns: int) -> Tensor:
    return torch.arange(2.0 * columns).view(2, columns)


def parts_by_hand(full: Tensor, case: tuple[int, int, tuple[int, ...]]) -> list[Tensor]:
    """The columns of every rank, without padding."""
    rows, _, counts = case
    bounds = [nested_chunk(rows, zip(counts, rank, strict=True)) for rank in itertools.product(*map(range, counts))]
    return [full[:, start : start + size] for start, size in bounds]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_separated(case: tuple[int, int, tuple[int, ...]]):
    full = sample(case[1])
    (separated,) = graph_of("separate", case)(full)
    padded = separated.split(nested(*case).part, 1)
    for made, expected in zip(padded, parts_by_hand(full, case), strict=True):
        assert torch.equal(made[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_joined(case: tuple[int, int, tuple[int, ...]]):
    full = sample(case[1])
    parts = parts_by_hand(full, case)
    padded = [torch.nn.functional.pad(part, (0, nested(*case).part - part.shape[1]), value=-1.0) for part in parts]
    (joined,) = graph_of("join", case)(torch.cat(padded, 1))
    assert joined.shape == full.shape
    assert torch.equal(joined[:, : case[0]], full[:, : case[0]])


def test_a_single_axis_starts_where_its_rows_are():
    assert [nested(2, 3, (2,)).start_of(rank) for rank in range(2)] == [0, 1]
    assert [nested(3, 3, (2,)).start_of(rank) for rank in range(2)] == [0, 2]
