"""What alternatives and moves take on an axis: worked out by hand from the hardware's rates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from lightning_autoparallel.cost import GroupShape, hardware_from
from lightning_autoparallel.plan.axis_times import AxisTimes
from lightning_autoparallel.plan.candidates import Candidate

aten = torch.ops.aten
R, P = Replicate(), Partial("sum")
# 100 TFLOP/s, 1000 GB/s, 100 GB/s between ranks, and no latencies but where a test gives one
RATES = {
    "base": "h100",
    "peak_tflops": {"float32": 200.0},
    "matmul_fraction": 0.5,
    "memory_gb_per_s": 2000.0,
    "memory_fraction": 0.5,
    "kernel_latency_us": 0.0,
    "launch_latency_us": 0.0,
    "intra_node": {"bandwidth_gb_per_s": 100.0, "latency_us": 0.0},
}


def product(rows: int, inner: int, columns: int) -> fx.Graph:
    graph = fx.Graph()
    with FakeTensorMode():
        shapes = {"x": (rows, inner), "w": (inner, columns)}
        values = {name: torch.empty(shape) for name, shape in shapes.items()}
        nodes = [graph.placeholder(name) for name in shapes]
        nodes.append(graph.call_function(aten.mm.default, tuple(nodes)))
        for node, value in zip(nodes, (*values.values(), values["x"] @ values["w"]), strict=True):
            node.meta["val"] = value
    graph.output((nodes[-1],))
    return graph


def times(graph: fx.Graph, ranks: int = 4, **rates: object) -> AxisTimes:
    return AxisTimes(graph, ranks, lambda node: (), GroupShape(ranks=ranks), hardware_from({**RATES, **rates}))


def test_a_product_is_as_much_shorter_as_its_tensors_are_cut() -> None:
    graph = product(1000, 1000, 1000)
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    whole, rows, inner = (Candidate(outputs=(o,), inputs=i, time_us=0.0) for o, i in (
        (R, (R, R)), (Shard(0), (Shard(0), R)), (P, (Shard(1), Shard(0)))
    ))  # fmt: skip
    of = times(graph).of
    assert of(node, whole) == pytest.approx(2e9 / 1e8)  # FLOPs at 100 TFLOP/s; 12 MB take 12 us
    assert of(node, rows) == pytest.approx(6.0)  # 4 MB of w and twice 1 MB at 1000 GB/s, longer than its 5 us of FLOPs
    assert of(node, inner) == pytest.approx(6.0)  # its result is whole on every rank
    larger = product(4000, 4000, 4000)
    (node,) = larger.find_nodes(op="call_function", target=aten.mm.default)
    assert times(larger).of(node, rows) == pytest.approx(2 * 4000**3 / 1e8 / 4)


def test_moves_are_those_of_the_collectives() -> None:
    move = times(product(4, 4, 4)).move
    size = 4 * 10**6
    assert move(R, R, size) == 0.0
    assert move(Shard(0), R, size) == pytest.approx(0.75 * 40)  # all-gather: 3/4 of 4 MB at 100 GB/s
    assert move(P, R, size) == pytest.approx(2 * 0.75 * 40)
    assert move(P, Shard(1), size) == pytest.approx(0.75 * 40)
    assert move(Shard(0), Shard(1), size) == pytest.approx(0.75 * 10)  # of the rank's quarter
    assert move(R, Shard(0), size) == pytest.approx(2 * 1e6 / 1e6)  # a copy of the quarter
    assert math.isinf(move(R, P, size))


def test_what_is_sent_beside_a_product_costs_what_that_does_not_hide() -> None:
    """A gather of 4 MB in 3 parts of 1 MB, 10 us each, beside a product of 20 us over four ranks: 5 us hide 5."""
    graph = product(1000, 1000, 1000)
    beside = times(graph).beside(graph.find_nodes(op="placeholder")[0], 0)
    assert beside.reading_us == {0: pytest.approx(5.0), 1: 0.0}, "it adds up over dim 1"
    assert beside.making_us == 0.0
    few = times(graph, intra_node={"bandwidth_gb_per_s": 1000.0, "latency_us": 0.0})
    assert few.move(Shard(0), R, 4 * 10**6, beside) == pytest.approx(min(3.0, max(0.0, 3.0 - 5.0) + 2 * 1.0))
    assert few.move(Shard(1), R, 4 * 10**6, beside) == pytest.approx(3.0)
    over_gloo = times(graph, backend="gloo", intra_node={"bandwidth_gb_per_s": 1000.0, "latency_us": 0.0})
    assert over_gloo.move(Shard(0), R, 4 * 10**6, beside) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("out", "inputs", "moved_bytes"),
    [
        (R, (R, R), 2 * 16_000 + 320),
        (Shard(0), (R, Shard(0)), (2 * 16_000 + 320) / 4),
        (Shard(1), (Shard(1), R), 2 * 16_000 / 4 + 320),
        (P, (Shard(0), R), 2 * 16_000 + 320),
    ],
    ids=["whole", "tokens", "columns", "rows"],
)
def test_a_look_up_reads_as_many_rows_as_it_writes_of_a_table_of_any_size(out, inputs, moved_bytes) -> None:
    """40 rows of 100 numbers, of 1000 there are: a rank that has not the row reads another and adds zeros."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = torch.empty(1000, 100), torch.zeros(40, dtype=torch.int64)
        nodes = [graph.placeholder(name) for name in ("table", "tokens")]
        nodes.append(graph.call_function(aten.embedding.default, tuple(nodes)))
        for node, value in zip(nodes, (*values, torch.nn.functional.embedding(values[1], values[0])), strict=True):
            node.meta["val"] = value
    graph.output((nodes[-1],))
    candidate = Candidate(outputs=(out,), inputs=inputs, time_us=0.0)
    assert times(graph).of(nodes[-1], candidate) == pytest.approx(moved_bytes / 1e6)


@pytest.mark.parametrize(
    ("op", "more", "launches"),
    [
        (aten._log_softmax.default, (1, False), 2),
        (aten._log_softmax_backward_data.default, (1, torch.float32), 1),
    ],
    ids=["forward", "backward"],
)
def test_a_cut_vocabulary_has_its_maximum_and_sums_reduced(op, more, launches) -> None:
    """Of 800 rows one number each, 3200 bytes, 5 us for each launch; a cut of rows sends nothing."""
    graph = fx.Graph()
    with FakeTensorMode():
        logits = torch.empty(800, 4000)
        nodes = [graph.placeholder(name) for name in ("x", "y")][: 1 + (launches == 1)]
        nodes.append(graph.call_function(op, (*nodes, *more)))
        for node in nodes:
            node.meta["val"] = logits
    graph.output((nodes[-1],))
    tensors = len(nodes) - 1
    rows, vocabulary = (Candidate(outputs=(Shard(dim),), inputs=(Shard(dim),) * tensors, time_us=0.0) for dim in (0, 1))
    of = times(graph, launch_latency_us=5.0).of
    inside_us = launches * (5 + 2 * 0.75 * 3200 / 1e5)
    assert of(nodes[-1], vocabulary) - of(nodes[-1], rows) == pytest.approx(inside_us)
    assert of(nodes[-1], rows) == pytest.approx((tensors + 1) * 800 * 1000 * 4 / 1e6)
