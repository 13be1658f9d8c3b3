"""The chosen placements of small graphs: what they communicate, counted after lowering."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan import make_plan
from tests.support.placements import P, R, S
from tests.unit._graphs import captured

aten = torch.ops.aten


def refuse(message: str) -> None:
    raise AssertionError(message)


def planned(fake_mesh, module: nn.Module, x, run=None, plan: str = "ddp", **options):
    graph = captured(module, x, run, shards=2, **options)
    placed = make_plan(graph, plan, fake_mesh(dp_shard=2), refuse)
    lowered = lower_graph(graph, placed).graph_module.graph
    return graph, placed, Counter(fxn.collective_kind(node) for node in fxn.collectives_of(lowered))


def outputs_of(graph, plan, op) -> list:
    return [plan.nodes[node.name].outputs[0] for node in graph.graph_module.graph.nodes if node.target is op]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_an_mlp_moves_no_activation(fake_mesh, name: str):
    """Only parameters and gradients travel: each gradient is reduced once, and the loss."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    graph, plan, counted = planned(fake_mesh, module, torch.randn(64, 8), lambda x: module(x).square().mean(), name)
    if name == "ddp":
        assert counted == {"all_reduce": 4 + 1}
    else:
        assert counted == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}
    assert set(outputs_of(graph, plan, aten.gelu.default)) == {(S(0),)}
    for (kind, _), node in zip(
        [(item.kind, item.name) for item in graph.outputs],
        graph.graph_module.graph.find_nodes(op="output")[0].args[0],
        strict=True,
    ):
        if kind == "gradient":
            assert plan.nodes[node.name].outputs == ((P,),)


def test_a_sum_with_two_readers_is_reduced_once(fake_mesh):
    def step(x):
        total = x.sum(0)
        return (total.exp() + total.sin()).sum()

    _, _, counted = planned(fake_mesh, nn.Linear(1, 1), torch.randn(4, 512), step, training=False)
    assert counted == {"all_reduce": 1}


def test_linear_readers_of_a_partial_sum_wait(fake_mesh):
    """A sum is scaled and summed again before it is reduced: one small collective, of a scalar."""
    _, _, counted = planned(fake_mesh, nn.Linear(1, 1), torch.randn(4, 512), lambda x: x.sum(0).sum(), training=False)
    assert counted == {"all_reduce": 1}


def test_constants_are_made_as_their_reader_wants_them(fake_mesh):
    def step(x):
        return (x + torch.full((8, 512), 3.0)).sum()

    graph, plan, counted = planned(fake_mesh, nn.Linear(1, 1), torch.randn(4, 512), step, training=False)
    assert outputs_of(graph, plan, aten.full.default) == [(S(0),)]
    assert counted == {"all_reduce": 1}


def test_batch_norm_reduces_its_statistics_only(fake_mesh):
    module = nn.BatchNorm1d(16)
    _, plan, counted = planned(fake_mesh, module, torch.randn(256, 16), lambda x: module(x).square().sum())
    assert counted["all_gather"] == counted["all_to_all"] == counted["reduce_scatter"] == 0
    assert counted["all_reduce"] >= 3  # mean, variance, loss, and the gradients
    assert plan.outputs[0] == (R,)


def test_all_ranks_decide_alike(fake_mesh):
    """The same request gives the same plan: nothing depends on set or hash order."""
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    mesh = fake_mesh(dp_shard=2)
    plans = []
    for _ in range(2):
        graph = captured(module, torch.randn(4, 8), lambda x: module(x).sum(), shards=2)
        plans.append(make_plan(graph, "fsdp", mesh, refuse))
    assert plans[0].nodes == plans[1].nodes and plans[0].outputs == plans[1].outputs


def test_a_cut_table_is_not_gathered_to_look_up_whole_rows(fake_mesh):
    """Two readers want the looked-up rows whole: those are reduced, the table that a rule cuts stays where it is."""
    table, hidden = nn.Embedding(30, 12), nn.Linear(12, 12)
    module = nn.ModuleList([table, hidden])
    rules = {"0.weight": {"tp": "S(0)"}, "1.weight": {"tp": "S(0)"}}

    def step(tokens):
        return torch.tanh(hidden(table(tokens))).square().mean()

    graph = captured(module, torch.randint(0, 30, (4, 6)), step, shards=1)
    plan = make_plan(graph, {"base": "fsdp", "rules": rules}, fake_mesh(tp=2), refuse)
    assert outputs_of(graph, plan, aten.embedding.default) == [(P,)]


@pytest.mark.parametrize("shape", [(4, 16), (4, 3, 16)], ids=str)
def test_a_layer_with_a_bias_is_cut_by_rows(fake_mesh, shape: tuple[int, ...]):
    """The bias is whole, and added to the reduced sum: once."""
    module = nn.Linear(16, 8)
    graph = captured(module, torch.randn(shape), lambda x: module(x).square().mean(), shards=1)
    plan = make_plan(graph, {"base": "fsdp", "rules": {"weight": {"tp": "S(1)"}}}, fake_mesh(tp=2), refuse)
    assert outputs_of(graph, plan, aten.mm.default if len(shape) == 2 else aten.einsum.default)[0] == (P,)
    assert not outputs_of(graph, plan, aten.add.Tensor)[0][0].is_partial()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_data_parallelism_reduces_a_table_s_gradient_however_large_it_is(fake_mesh, size: int):
    """Gathering the rows' gradients would be cheaper than reducing 64 MB of table; it would move activations."""
    table = nn.Embedding(1 << 18, 64)
    graph = captured(table, torch.randint(0, 9, (size, 4)), lambda x: table(x).square().mean(), shards=size)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=size), refuse)
    assert outputs_of(graph, plan, aten.embedding_dense_backward.default) == [(P,)]


def test_rows_are_gathered_where_a_sum_of_all_pairs_would_be_reduced(fake_mesh):
    """Similarities of all rows with all: 4 MB of rows to gather, or 268 MB of partial sums to reduce."""
    rows, width = 8192, 128
    module = nn.ModuleDict({"query": nn.Linear(width, width), "key": nn.Linear(width, width)})

    def step(x):
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(module["query"](x) @ module["key"](x).t(), torch.arange(rows))

    graph = captured(module, torch.randn(rows // 8, width), step, shards=8)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=8), refuse)
    nodes = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    similarities = next(node for node in nodes if fxn.values(node)[0].shape == (rows, rows))
    assert not plan.nodes[similarities.name].outputs[0][0].is_partial()


@pytest.mark.parametrize("rows", [4, 4096])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_drawn_for_rows_is_drawn_where_they_lie(fake_mesh, rows: int, dim: int):
    """Drawn whole it would be sent: ranks of other rows draw from other seeds."""

    def step(x):
        wide = x[:, None] if dim == 0 else x[None]
        mask = torch.rand(rows, 3, 8) if dim == 0 else torch.rand(3, rows, 8)
        return ((wide * (mask > 0.1)).square() + wide * (torch.rand_like(mask) < 0.5)).mean()

    graph, plan, counted = planned(fake_mesh, nn.Linear(1, 1), torch.randn(rows // 2, 8), step, training=False)
    assert counted == {"all_reduce": 1}
    assert outputs_of(graph, plan, aten.rand.default) == [(S(dim),)] * 2


def test_what_all_rows_share_is_drawn_once(fake_mesh):
    step = lambda x: (x * (torch.rand(1, 8) > 0.1)).mean()  # noqa: E731
    _, _, counted = planned(fake_mesh, nn.Linear(1, 1), torch.randn(2, 8), step, training=False)
    assert counted["broadcast"] + counted["all_gather"] == 1 and counted["all_reduce"] == 1


def test_rows_are_gathered_before_differences_of_all_pairs(fake_mesh):
    """Slices of the width of two batches are an all-to-all away, but make differences of all pairs to be added up.

    The two are joined along their rows, which no shard of rows outlives.
    """
    rows, width = 256, 64
    module = nn.Linear(width, width)

    def step(x):
        both = torch.cat([module(x), torch.randn(rows, width)])
        distances = (both[:, None] - both[None]).square().sum(-1)
        return torch.exp(-distances).mean()

    graph = captured(module, torch.randn(rows // 2, width), step, shards=2)
    plan = make_plan(graph, "fsdp", fake_mesh(dp_shard=2), refuse)
    nodes = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    pairs = [node for node in nodes if fxn.values(node)[0].shape[:2] == (2 * rows, 2 * rows)]
    assert len(pairs) > 5
    assert {plan.nodes[node.name].outputs[0][0] for node in pairs} <= {S(0), S(1), R}


def test_hidden_rows_are_not_gathered_to_save_a_launch_that_gradients_share(fake_mesh):
    """Behind a softmax over the batch gradients lie in slices of the width: they go back to the rows that are hidden.

    Cut by the width the weights' gradient would need no reduction, but all hidden rows. Reductions of gradients go in
    buckets: one more of them takes what its bytes take.
    """
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    batch = torch.randn(256, 64)
    graph = captured(module, batch, lambda x: (module(x).softmax(0) * x).sum(), shards=8)
    plan = make_plan(graph, "ddp", fake_mesh(dp_shard=8), refuse)
    nodes = [node for node in graph.graph_module.graph.nodes if node.target is aten.mm.default]
    gradients = [node for node in nodes if 256 * 8 not in fxn.values(node)[0].shape]
    assert [plan.nodes[node.name].outputs[0][0] for node in gradients] == [P, P]


def test_a_result_goes_back_to_its_rows_before_it_leaves(fake_mesh):
    """Behind a softmax over the batch slices of the width could be computed with, which do not leave a step."""
    module = nn.Linear(64, 1024)
    graph = captured(module, torch.randn(1024, 64), lambda x: module(x).softmax(0).relu(), shards=2, training=False)
    plan = make_plan(graph, "ddp", fake_mesh(dp_shard=2), refuse)
    assert outputs_of(graph, plan, aten._softmax.default) == [(S(1),)]
    assert outputs_of(graph, plan, aten.relu.default) == [(S(0),)]
