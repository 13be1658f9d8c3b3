"""Operator times: the larger of FLOPs and memory traffic."""

from __future__ import annotations

import pytest
import torch

from lightning_autoparallel.cost.compute import local_size_bytes, operator_flops, operator_time_us
from lightning_autoparallel.cost.hardware import HardwareSpec

aten = torch.ops.aten
ROUND = HardwareSpec(
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
