"""What ranks placements: operators on a share of their tensors, and moves over one axis in rings."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_autoparallel.cost.flops import operator_flops
from lightning_autoparallel.cost.placement import (
    PlacementRates,
    local_size_bytes,
    operator_time_us,
    redistribution_kind,
    redistribution_time_us,
)
from tests.support.placements import P, R, S

aten = torch.ops.aten
ROUND = PlacementRates(
    name="round", matmul_tflops=1.0, memory_gb_per_s=1.0, link_gb_per_s=1.0, link_latency_us=5.0, kernel_latency_us=3.0
)
A, B = torch.empty(8, 16), torch.empty(16, 4)


def test_flops_of_a_matmul():
    assert operator_flops(aten.mm.default, (A, B), {}, A @ B) == 2 * 8 * 16 * 4


def test_an_operator_that_is_not_counted_is_bound_by_memory():
    """Unknown is never free: it has no FLOPs, but its traffic."""
    assert operator_flops(aten.erfinv.default, (A,), {}, A) == 0
    assert operator_time_us(aten.erfinv.default, (A,), {}, A, 5000, 1.0, ROUND) == pytest.approx(5.0)


def test_a_view_is_free():
    assert operator_time_us(aten.view.default, (A, [16, 8]), {}, A, 5000, 1.0, ROUND) == 0


@pytest.mark.parametrize(("size", "expected_us"), [(0, 1024 / 1e6), (5000, 5.0)])
def test_the_larger_of_both_counts(size: int, expected_us: float):
    assert operator_time_us(aten.mm.default, (A, B), {}, A @ B, size, 1.0, ROUND) == pytest.approx(expected_us)


def test_a_share_of_the_flops():
    time_us = operator_time_us(aten.mm.default, (A, B), {}, A @ B, 0, 0.25, ROUND)
    assert time_us == pytest.approx(256 / 1e6)


def test_local_bytes():
    assert local_size_bytes([A, None, B.double()], [4, 1, 1]) == 8 * 16 * 4 // 4 + 16 * 4 * 8


KINDS = {
    (R, R): None,
    (P, P): None,
    (S(0), S(0)): None,
    (R, S(1)): "slice",
    (R, S(1, 2)): "slice",
    (R, P): "impossible",
    (S(0), P): "impossible",
    (P, R): "all_reduce",
    (P, S(0)): "reduce_scatter",
    (P, S(0, 2)): "reduce_scatter",
    (S(0), R): "all_gather",
    (S(0, 2), R): "all_gather",
    (S(0), S(1)): "all_to_all",
    (S(0), S(0, 2)): "all_gather",
    (S(1, 2), S(1)): "all_gather",
}


@pytest.mark.parametrize(("source", "target"), KINDS, ids=str)
def test_kinds(source, target):
    assert redistribution_kind(source, target) == KINDS[source, target]


@pytest.mark.parametrize(
    ("source", "target", "bytes_sent"),
    [
        (S(0), R, 3000),  # each rank passes on the three quarters that it had not
        (P, S(0), 3000),
        (P, R, 6000),  # a reduce-scatter and an all-gather
        (S(0), S(1), 750),  # of its own quarter, three quarters
    ],
    ids=str,
)
def test_a_ring_of_four(source, target, bytes_sent: int):
    time_us = redistribution_time_us(source, target, 4000, 4, ROUND)
    assert time_us == pytest.approx(5.0 + bytes_sent / 1000)  # 1 GB/s is 1000 bytes per microsecond


def test_what_needs_no_link():
    assert redistribution_time_us(S(0), S(0), 4000, 4, ROUND) == 0
    assert redistribution_time_us(R, S(0), 4000, 4, ROUND) == pytest.approx(3.0 + 2 * 1000 / 1000)
    assert math.isinf(redistribution_time_us(R, P, 4000, 4, ROUND))
