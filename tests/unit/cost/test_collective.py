"""Which collective a redistribution is, and that its time is the formula of a ring."""

from __future__ import annotations

import math

import pytest

from lightning_autoparallel.cost.collective import redistribution_kind, redistribution_time_us
from lightning_autoparallel.cost.hardware import HardwareSpec
from tests.placements import P, R, S

ROUND = HardwareSpec(
    name="round", matmul_tflops=1.0, memory_gb_per_s=1.0, link_gb_per_s=1.0, link_latency_us=5.0, kernel_latency_us=3.0
)
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
