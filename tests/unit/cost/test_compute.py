"""Times of calls: the larger of FLOPs and bytes, and nothing unknown for free."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from lightning_autoparallel.cost.compute import graph_times_us, node_time_us, share_time_us, unrated_dtypes
from lightning_autoparallel.cost.flops import node_flops, operator_flops
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.torch_compat import rank_operators as ranked
from tests.unit.cost._graphs import ROUND, Builder, aten

A, B = torch.empty(8, 16), torch.empty(16, 4)


def test_flops_of_products():
    assert operator_flops(aten.mm.default, (A, B), {}, A @ B) == 2 * 8 * 16 * 4
    assert operator_flops(aten.einsum.default, ("ab,bc->ac", [A, B]), {}, A @ B) == 2 * 8 * 16 * 4
    assert operator_flops(ranked.WIDE_PRODUCT, (A, B), {}, A @ B) == 2 * 8 * 16 * 4
    assert operator_flops(ranked.ADD_PRODUCT, (A, B, A @ B), {}, A @ B) == 2 * 8 * 16 * 4
    assert operator_flops(aten.erfinv.default, (A,), {}, A) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention_are_those_of_torchs_counter_and_heads_may_share_keys(causal: bool):
    query, shared = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
    forward = aten._scaled_dot_product_cudnn_attention.default
    args = (query, query, query, None, True, 0.0, causal)
    counted = flop_registry[aten._scaled_dot_product_cudnn_attention](*args, out_val=(query,))
    assert operator_flops(forward, args, {}, (query,)) == counted == 2 * 2 * (2 * 4 * 8 * 8 * 16)
    assert operator_flops(forward, (query, shared, shared, *args[3:]), {}, (query,)) == counted
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (query, query, query, query, query, torch.zeros(2, 4, 8), 0.0, causal)
    counted = flop_registry[aten._scaled_dot_product_flash_attention_backward](*args, out_val=(query,) * 3)
    assert operator_flops(backward, args, {}, (query,) * 3) == counted


def test_a_product_is_bound_by_its_flops_or_its_bytes():
    """64 x 64 x 64 in float32: 524288 FLOPs at 1 TFLOP/s; 3 x 16384 bytes at 1 GB/s."""
    build = Builder()
    square = build.input(64, 64)
    product = build.call(aten.mm.default, square, build.input(64, 64))
    build.output(product)
    assert node_time_us(product, ROUND) == pytest.approx(3 * 16.384)
    long = Builder()
    product = long.call(aten.mm.default, long.input(4, 10**6), long.input(10**6, 4))
    long.output(product)
    fast_memory = replace(ROUND, memory_gb_per_s=2e6)
    assert node_time_us(product, fast_memory) == pytest.approx(2 * 4 * 4 * 10**6 / 1e6)


def test_the_peak_is_that_of_the_operands():
    build = Builder()
    operands = [build.input(1024, 1024, dtype=torch.bfloat16) for _ in range(2)]
    product = build.call(aten.mm.default, *operands)
    build.output(product)
    assert node_time_us(product, ROUND) == pytest.approx(max(2 * 1024**3 / 2e6, 3 * 2 * 1024**2 / 1e3))
    added = build.call(ranked.ADD_PRODUCT, *operands, build.input(1024, 1024))
    assert node_time_us(added, ROUND) == pytest.approx(max(2 * 1024**3 / 2e6, (2 * 2 + 2 * 4) * 1024**2 / 1e3))
    none = replace(ROUND, peak_tflops={"float32": 1.0})
    with pytest.raises(ConfigError, match="no peak for matrix products in bfloat16"):
        node_time_us(product, none)


@pytest.mark.parametrize(
    ("peaks", "taken_for"),
    [
        ({"float32": 2.0, "bfloat16": 4.0, "float16": 1.0}, torch.bfloat16),
        ({"float32": 2.0, "float16": 1.0}, torch.float32),
        ({"float16": 1.0, "int8": 2.0}, torch.float16),
    ],
)
def test_plans_compare_products_without_a_peak_as_if_they_were_of_a_dtype_that_has_one(peaks, taken_for):
    hardware = replace(ROUND, peak_tflops=peaks, memory_gb_per_s=1e6)
    times = []
    for dtype in (torch.bfloat16, taken_for):
        build = Builder()
        product = build.call(aten.mm.default, *(build.input(1024, 1024, dtype=dtype) for _ in range(2)))
        graph = build.output(product)
        times.append(share_time_us(product, "kernel", 8.0, 0.5, hardware))
        unrated = [torch.bfloat16] if dtype == torch.bfloat16 != taken_for else []
        assert unrated_dtypes(graph, hardware) == unrated
    assert times[0] == times[1] == pytest.approx(1024**3 / (peaks[str(taken_for)[6:]] * 0.5 * 1e6))


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_the_half_that_causal_kernels_compute(causal: bool, share: float):
    """Batch 2, 3 heads, 64 queries and keys of width 8: two products forward, five backward."""
    build = Builder()
    query, key, value = (build.input(2, 3, 64, 8) for _ in range(3))
    rows = torch.empty(2, 3, 64, device="meta")
    op = aten._scaled_dot_product_flash_attention_for_cpu
    forward = build.valued((query.meta["val"], rows), op.default, query, key, value, 0.0, causal)
    out = build.call(operator.getitem, forward, 0)
    lse = build.call(operator.getitem, forward, 1)
    grads = tuple(query.meta["val"] for _ in range(3))
    name = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    backward = build.valued(grads, name, query, query, key, value, out, lse, 0.0, causal)
    build.output(build.call(operator.getitem, backward, 0))
    one_product = 2 * 2 * 3 * 64 * 64 * 8 * share
    assert node_flops(forward) == 2 * one_product
    assert node_flops(backward) == 5 * one_product


def test_an_operator_of_others_is_an_error():
    build = Builder()
    x = build.input(4)
    mystery = build.valued(x.meta["val"], torch.ops.debugprims.load_tensor.default, "x", [4], [1])
    mystery.meta["custom"] = {"source": "model.py:12"}
    graph = build.output(mystery)
    with pytest.raises(UnsupportedOpError, match=r"load_tensor.* \(model.py:12\) calls debugprims"):
        graph_times_us(graph, ROUND)


def test_a_call_without_a_fake_value_is_an_error():
    build = Builder()
    build.output(build.graph.call_function(aten.mul.Tensor, (build.input(4), 2)))
    with pytest.raises(UnsupportedOpError, match="mul_tensor has no fake value"):
        graph_times_us(build.graph, ROUND)


def test_views_and_sizes_are_free():
    build = Builder()
    x = build.input(4, 8)
    flat = build.call(aten.view.default, x, [32])
    halves = build.call(aten.split.Tensor, flat, 16)
    graph = build.output(build.call(operator.getitem, halves, 1))
    assert set(graph_times_us(graph, ROUND).values()) == {0.0}
