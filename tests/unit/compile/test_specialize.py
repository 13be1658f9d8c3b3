"""One text for all ranks becomes each rank's own calls: splits that meet, parts in the order of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from lightning_autoparallel.compile import specialize
from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.cost.liveness import predict_memory
from lightning_autoparallel.cost.storage import resolve_storages
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat import rank_operators as ranked
from lightning_autoparallel.torch_compat.inductor import compile_graph
from lightning_autoparallel.torch_compat.tracing import fake_tracing
from tests.support.lockstep import one_group, run_lockstep
from tests.unit.cost._graphs import ROUND, Builder, aten

GROUP = "ring"


def rank_graphs(graph: fx.Graph, ranks: int) -> list[fx.Graph]:
    """The graph of every rank."""
    graphs = []
    for rank in range(ranks):
        own = copy.deepcopy(fx.GraphModule(nn.Module(), graph)).graph
        specialize(own, lambda group, rank=rank: (rank, ranks))
        graphs.append(own)
    return graphs


def _run(graph: fx.Graph, inputs: list[Tensor]) -> list[list[Tensor]]:
    ranks = len(inputs)
    return run_lockstep(rank_graphs(graph, ranks), [[x] for x in inputs], one_group(GROUP, ranks))


def _permuted(build: Builder, x: fx.Node, shift: int) -> fx.Node:
    return build.wait(build.call(ranked.SHARD_PERMUTE, x, shift, GROUP))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_transfer_brings_the_tensor_of_the_rank_further_on(ranks: int):
    inputs = [torch.full((4, 3), float(rank)) for rank in range(ranks)]
    for shift in range(1, ranks):
        build = Builder()
        graph = build.output(_permuted(build, build.input(4, 3), shift))
        received = [int(result[0, 0]) for (result,) in _run(graph, inputs)]
        assert received == [(rank + shift) % ranks for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_are_joined_and_added_in_the_order_of_ranks(ranks: int):
    build = Builder()
    x = build.input(1, 2)
    parts = [x, *(_permuted(build, x, shift) for shift in range(1, ranks))]
    graph = build.output(build.call(ranked.RANK_CAT, parts, 0, GROUP), build.call(ranked.RANK_SUM, parts, GROUP))
    # 1 is lost beside the larger numbers: every order of addition gives another result.
    inputs = [torch.tensor([[value, 0.0]]) for value in (2.0**30, 1.0, -(2.0**30), 3.0)[:ranks]]
    expected = inputs[0]
    for other in inputs[1:]:
        expected = expected + other
    for joined, total in _run(graph, inputs):
        assert torch.equal(joined, torch.cat(inputs)) and torch.equal(total, expected)


def test_a_chunk_is_a_view_of_the_rank_further_on():
    build = Builder()
    x = build.input(2, 6)
    chunk = build.call(ranked.RANK_CHUNK, x, 1, 2, 3, GROUP)
    graph = build.output(chunk)
    storages = resolve_storages(graph)
    assert storages.of(chunk) == storages.of(x)
    whole = torch.arange(12.0).reshape(2, 6)
    results = [result for (result,) in _run(graph, [whole] * 3)]
    for rank, result in enumerate(results):
        assert torch.equal(result, whole.chunk(3, 1)[(rank + 2) % 3])


def test_a_wide_product_is_not_rounded():
    build = Builder()
    x = build.input(8, 8, dtype=torch.bfloat16)
    graph = build.output(build.call(ranked.WIDE_PRODUCT, x, x))
    value = torch.randn(8, 8).bfloat16()
    ((result,),) = _run(graph, [value])
    torch.testing.assert_close(result, value.float() @ value.float(), rtol=0, atol=0)


def _sum_of_products(build: Builder, x: fx.Node, products: int) -> list[fx.Node]:
    """What each product is added to, from the first one on: ``x @ x`` so many times."""
    sums = [build.call(ranked.WIDE_PRODUCT, x, x)]
    while len(sums) < products:
        sums.append(build.call(ranked.ADD_PRODUCT, x, x, sums[-1]))
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_where_their_sum_lies(dtype: torch.dtype):
    build = Builder()
    x = build.input(8, 8, dtype=dtype)
    sums = _sum_of_products(build, x, 3)
    graph = build.output(build.call(aten.neg.default, sums[-1]))
    storages = resolve_storages(graph)
    assert len({storages.of(one) for one in sums}) == 1
    value = torch.randn(8, 8).to(dtype)
    ((result,),) = _run(graph, [value])
    torch.testing.assert_close(result, -3 * (value.float() @ value.float()))
    (own,) = rank_graphs(graph, 1)
    calls = [node.target for node in own.nodes]
    assert calls.count(ranked.ADD_PRODUCT_IN_PLACE) == 2 and ranked.ADD_PRODUCT not in calls


def test_what_a_compiled_sum_reads_stays_as_it_is_padded():
    """Rows are padded on GPUs mostly: for an operator that asks for the traced strides they would be copied."""
    shapes = [(2051, 32), (64, 32), (2051, 32)]
    graph = fx.Graph()
    table, rows, given = (graph.placeholder(f"input_{i}") for i in range(3))
    with fake_tracing():
        for node, shape in zip((table, rows, given), shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
    output = graph.output(())
    call = Calls(output, {})
    scores = call(aten._softmax.default, call(aten.mm.default, rows, call(aten.t.default, table)), 1, False)
    total = call(aten.mm.default, given, call(aten.mm.default, call(aten.t.default, rows), rows))
    output.args = (
        [call(ranked.ADD_PRODUCT, call(aten.t.default, scores), rows, total), call(aten.mm.default, scores, table)],
    )
    specialize(graph, lambda group: (0, 1))
    with torch._inductor.config.patch(disable_padding_cpu=False, fx_graph_cache=False):
        lowered, codes = run_and_get_code(
            compile_graph, fx.GraphModule(nn.Module(), graph), is_inference=True, is_backward=False
        )
    t, r, g = (0.1 * torch.randn(shape) for shape in shapes)
    expected = (r @ t.t()).softmax(1)
    results = lowered.call([t.clone(), r.clone(), g.clone()])
    for result, wanted in zip(results, (expected.t() @ r + g @ (r.t() @ r), expected @ t), strict=True):
        torch.testing.assert_close(result, wanted)
    (code,) = codes
    assert code.count("add_product_.default(") == 1
    assert "empty_strided_cpu((2051, 64)" not in code  # unpadded


def test_a_sum_that_is_read_as_it_was_stays():
    build = Builder()
    x = build.input(8, 8)
    first, second, third = _sum_of_products(build, x, 3)
    given = build.call(ranked.ADD_PRODUCT, x, x, x)  # what is given to the graph is not its own to write to
    squared = build.call(ranked.ADD_PRODUCT, third, x, third)  # it is still read while the sum is written
    graph = build.output(build.call(aten.neg.default, second), third, given, squared)
    storages = resolve_storages(graph)
    assert storages.of(first) == storages.of(second)
    assert len({storages.of(one) for one in (second, third, given, squared)}) == 4
    value = torch.randn(8, 8)
    product = value @ value
    ((*results,),) = _run(graph, [value.clone()])
    expected = [-2 * product, 3 * product, value + product, 3 * product + 3 * product @ value]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4)
    (own,) = rank_graphs(graph, 1)
    assert [node.target for node in own.nodes].count(ranked.ADD_PRODUCT_IN_PLACE) == 1


def test_a_narrow_product_beside_a_sum_that_stays_is_not_rounded():
    build = Builder()
    x = build.input(8, 8, dtype=torch.bfloat16)
    first, second = _sum_of_products(build, x, 2)
    graph = build.output(first, second)
    value = torch.randn(8, 8).bfloat16()
    ((kept, added),) = _run(graph, [value])
    product = value.float() @ value.float()
    torch.testing.assert_close(kept, product, rtol=0, atol=0)
    torch.testing.assert_close(added, product + product, rtol=0, atol=0)


def test_what_is_left_is_torchs_own():
    build = Builder()
    x = build.input(4, 4)
    parts = [x, _permuted(build, x, 1)]
    graph = build.output(build.call(ranked.RANK_CAT, parts, 0, GROUP))
    for rank, own in enumerate(rank_graphs(graph, 2)):
        assert not any(str(node.target).startswith(ranked.NAMESPACE) for node in own.nodes)
        (transfer,) = fxn.collectives_of(own)
        assert transfer.target is collectives.ALL_TO_ALL
        splits = [[0, 4], [4, 0]]
        assert transfer.args[1:3] == (splits[rank], splits[rank])


@pytest.mark.parametrize("call", [(ranked.SHARD_PERMUTE, 2, GROUP), (ranked.RANK_CHUNK, 0, 1, 4, GROUP)])
def test_ranks_that_would_not_meet_are_refused(call: tuple[Any, ...]):
    build = Builder()
    graph = build.output(build.call(call[0], build.input(4, 4), *call[1:]))
    with pytest.raises(PassError, match=r"shift of 2 among 2 ranks|into 4 chunks on a group of 2 ranks"):
        specialize(graph, lambda group: (0, 2))


def test_what_is_sent_lies_row_by_row():
    build = Builder()
    graph = build.output(build.call(ranked.SHARD_PERMUTE, build.call(aten.t.default, build.input(4, 3)), 1, GROUP))
    with pytest.raises(PassError, match=r"cannot be lowered to a send and a receive: what it sends has strides"):
        specialize(graph, lambda group: (0, 2))


def test_costs_know_transfers_and_what_is_joined():
    build = Builder()
    x, weight = build.input(8, 8), build.input(8, 8)
    started = build.call(ranked.SHARD_PERMUTE, x, 1, GROUP)
    product = build.call(aten.mm.default, x, weight)
    other = build.call(aten.mm.default, build.wait(started), weight)
    graph = build.output(build.call(ranked.RANK_CAT, [product, other], 0, GROUP))
    costs = CostModel(hardware=ROUND, groups={GROUP: GroupShape(ranks=4)})
    # a launch, one hop, 256 bytes at 1000 a microsecond; each product reads and writes 3 x 256 bytes at 1 ns
    assert costs.collective_time_us(started) == pytest.approx(10 + 2 + 0.256)
    timeline = costs.timeline(graph)
    joining_us = 4 * 0.256
    assert timeline.time_us == pytest.approx(10 + 2 + 0.256 + 3 * 0.256 + joining_us)
    assert fxn.count_collectives(graph, {})["permute"][GROUP].count == 1
    # What is sent stays until it has arrived; at the end there are both inputs, both products and their joint copy.
    memory = predict_memory(graph, held=[weight.name])
    assert memory.live_bytes[[node.op for node in graph.nodes].index("call_function") + 1] == (2 + 1 + 1) * 256
    assert predict_memory(graph, held=[x.name, weight.name]).peak_bytes == (2 + 2 + 2) * 256
