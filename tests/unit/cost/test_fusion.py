"""Bytes that go through memory: values between fused calls do not."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from lightning_autoparallel.cost.fusion import graph_kinds, graph_traffic, node_traffic
from tests.unit.cost._graphs import Builder, aten

KIB = 1024  # 16 x 16 values of float32


def traffic_of(build: Builder, *nodes):
    graph = build.output(*nodes)
    counted = graph_traffic(graph, graph_kinds(graph))
    return {node.name: size for node, size in counted.items() if size}


def test_a_chain_reads_its_input_and_writes_its_end():
    build = Builder()
    x = build.input(16, 16)
    last = build.call(aten.exp.default, build.call(aten.mul.Tensor, x, x))
    assert traffic_of(build, last) == {"mul_tensor": KIB, "exp_default": KIB}


def test_what_a_matrix_product_reads_is_written():
    build = Builder()
    doubled = build.call(aten.mul.Tensor, build.input(16, 16), 2)
    turned = build.call(aten.t.default, doubled)
    product = build.call(aten.mm.default, turned, doubled)
    # the product reads it twice, the second time as it lies: two values of the graph
    assert traffic_of(build, product) == {"mul_tensor": 2 * KIB, "mm_default": 3 * KIB}


def test_a_residual_is_read_again_after_the_product():
    """The sum comes after a kernel that depends on the first call: they cannot be one."""
    build = Builder()
    first = build.call(aten.mul.Tensor, build.input(16, 16), 2)
    product = build.call(aten.mm.default, first, build.input(16, 16))
    last = build.call(aten.add.Tensor, first, product)
    assert traffic_of(build, last) == {"mul_tensor": 2 * KIB, "mm_default": 3 * KIB, "add_tensor": 3 * KIB}
    assert node_traffic(last) == 2 * KIB  # alone, it cannot tell


def test_the_order_of_calls_does_not_matter():
    """An independent product between two pointwise calls does not part them."""
    build = Builder()
    x, y = build.input(16, 16), build.input(16, 16)
    first = build.call(aten.mul.Tensor, x, 2)
    product = build.call(aten.mm.default, y, y)
    last = build.call(aten.exp.default, first)
    assert traffic_of(build, last, product) == {"mul_tensor": KIB, "mm_default": 2 * KIB, "exp_default": KIB}


@pytest.mark.parametrize("alone", [True, False])
def test_parts_of_a_concatenation_are_written_where_they_belong(alone: bool):
    """Two casts behind different products: each kernel reads its product and writes half of the result."""
    build = Builder()
    x = build.input(16, 16)
    first = build.call(aten.mm.default, x, x)
    second = build.call(aten.mm.default, first, x)
    casts = [build.call(aten.exp.default, product) for product in (first, second)]
    joined = build.call(aten.cat.default, [build.call(aten.view.default, cast, [256]) for cast in casts])
    also_read = [] if alone else casts[:1]
    products = {"mm_default": 2 * KIB, "mm_default_1": 3 * KIB}
    # The second is computed on the level of the concatenation: one kernel, which writes it. So does the first, unless
    # something else needs it, too.
    expected = products | {"exp_default": 2 * KIB, "exp_default_1": KIB}
    assert traffic_of(build, joined, *also_read) == expected | {"cat_default": KIB if alone else 3 * KIB}


def test_a_norm_reads_its_input_once():
    build = Builder()
    x = build.input(16, 16)
    mean = build.call(aten.mean.dim, build.call(aten.mul.Tensor, x, x), [1], True)
    last = build.call(aten.mul.Tensor, x, build.call(aten.rsqrt.default, mean))
    assert traffic_of(build, last) == {"mul_tensor": KIB, "mul_tensor_1": KIB}


def test_a_row_too_long_for_a_kernel_is_read_twice():
    """Rows of 32768 floats are 128 KiB."""
    build = Builder()
    x = build.input(2, 32768)
    greatest = build.call(aten.amax.default, x, [1], True)
    last = build.call(aten.sub.Tensor, x, greatest)
    size = 2 * 32768 * 4
    assert traffic_of(build, last) == {"amax_default": size + 8, "sub_tensor": 2 * size + 8}


def _norms(build: Builder, x: fx.Node, width: int) -> list[fx.Node]:
    """Operators that need a whole row before they give any of it, and what reads them."""
    weight = build.input(width)
    norm = build.call(aten.native_layer_norm.default, x, [width], weight, weight, 1e-5)
    out, mean, rstd = (build.call(operator.getitem, norm, index) for index in range(3))
    back = build.call(
        aten.native_layer_norm_backward.default, x, x, [width], mean, rstd, weight, weight, [True, True, True]
    )
    others = [
        build.call(aten._softmax.default, x, 1, False),
        build.call(aten._softmax_backward_data.default, x, x, -1, torch.float32),
        build.call(aten.cumsum.default, x, 1),
    ]
    return [out, build.call(operator.getitem, back, 0), *others]


@pytest.mark.parametrize("kind", range(5), ids=["norm", "norm_backward", "softmax", "softmax_backward", "cumsum"])
@pytest.mark.parametrize("width", [1024, 32768])
def test_what_needs_whole_rows_ends_its_kernel_if_they_are_long(kind: int, width: int):
    """Rows of 4 KiB stay where they are; of 128 KiB, what reads the result reads it from memory."""
    build = Builder()
    whole = _norms(build, build.input(2, width), width)[kind]
    last = build.call(aten.exp.default, whole)
    written = 2 * width * 4
    assert traffic_of(build, last)[last.name] == (written if width == 1024 else 2 * written)


def test_sums_over_several_dims_are_of_rows_too():
    """Over dims of one element, and over all of 128 KiB."""
    build = Builder()
    x = build.input(32768, 1)
    same = build.call(aten.exp.default, build.call(aten.sum.dim_IntList, x, [1], True))
    whole = build.call(aten.exp.default, build.call(aten.sum.dim_IntList, x, [0, 1], True))
    counted = {"sum_dim_int_list": 2**17, "exp_default": 2**17, "sum_dim_int_list_1": 4, "exp_default_1": 4 + 4}
    assert traffic_of(build, same, whole) == counted  # both sums read once, the second one's result goes through memory


def test_the_larger_of_two_values_is_no_reduction():
    build = Builder()
    x = build.input(2, 32768)
    larger = build.call(aten.maximum.default, x, x)
    same = build.call(aten.max.other, larger, x)
    last = build.call(aten.exp.default, same)
    assert traffic_of(build, last) == {"maximum_default": 2 * 32768 * 4, "exp_default": 2 * 32768 * 4}


def test_rows_that_are_looked_up():
    """4 rows of a table of 1000: the indices, the rows, and the rows written."""
    build = Builder()
    table, index = build.input(1000, 16), build.input(4, dtype=torch.int64)
    last = build.call(aten.embedding.default, table, index)
    assert traffic_of(build, last) == {"embedding_default": 4 * 8 + 2 * 4 * 16 * 4}


def test_constants_are_made_where_they_are_needed():
    build = Builder()
    ones = build.call(aten.full.default, [16, 16], 1.0, device="meta")
    product = build.call(aten.mm.default, build.input(16, 16), build.input(16, 16))
    last = build.call(aten.add.Tensor, product, ones)
    assert traffic_of(build, last) == {"mm_default": 3 * KIB, "add_tensor": 2 * KIB}


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.mm.default], ids=str)
def test_a_call_between_inputs_and_outputs_is_the_same_alone(op):
    build = Builder()
    node = build.call(op, build.input(16, 16), build.input(16, 16))
    assert traffic_of(build, node) == {node.name: 3 * KIB}
    assert node_traffic(node) == 3 * KIB
