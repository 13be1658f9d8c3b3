"""The graph each rank runs: local shapes, each value moved once, gradients reduced early; all ranks run in lockstep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import local_shape
from lightning_autoparallel.plan import make_plan
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import one_group, run_lockstep
from tests.support.placements import cut, joined
from tests.unit._graphs import captured, run_captured

aten = torch.ops.aten


class Model(nn.Module):
    """Uneven parameters, norms over batch and groups, a reshape, a buffer that is changed, rows that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(4, 3)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, x):
        hidden = self.groups(self.norm(self.first(x)).relu()).reshape(-1, 2, 4).transpose(0, 1)
        rows = self.last(hidden).softmax(-1)
        return {"loss": rows.square().mean() + rows.amax(), "rows": rows.detach().transpose(0, 1)}


def lowered(fake_mesh, module: nn.Module, batch, run=None, plan: str = "fsdp", rank: int = 0, size: int = 2, **options):
    graph = captured(module, batch, run, shards=size, **options)
    placed = make_plan(graph, plan, fake_mesh(dp_shard=size, rank=rank), print)
    return graph, placed, lower_graph(graph, placed)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_together_compute_what_one_device_does(fake_mesh, plan: str, size: int):
    torch.manual_seed(0)
    check_together(fake_mesh, Model(), torch.randn(4 * size, 6), plan, size)


def check_together(fake_mesh, module: nn.Module, x: torch.Tensor, plan: str, size: int) -> None:
    """Results and gradients of all ranks, in lockstep, are those of the graph as it was captured."""
    graph, placed, sharded = lowered(fake_mesh, module, x[: len(x) // size], plan=plan, size=size)
    (axis,) = placed.axes
    graphs = [sharded.graph_module.graph]
    for rank in range(1, size):
        mine = PlanAxis(mesh_axes=axis.mesh_axes, size=size, rank=rank, group_name=axis.group_name)
        graphs.append(lower_graph(graph, _on(placed, mine)).graph_module.graph)
    expected = run_captured(graph, module, x)
    outputs = run_lockstep(graphs, _inputs(graph, placed, module, x, size), one_group(axis.group_name, size))
    for i, (item, placements) in enumerate(zip(graph.outputs, placed.outputs, strict=True)):
        full = expected[item.kind, item.name]
        together = joined([output[i] for output in outputs], placements[0], full.shape)
        torch.testing.assert_close(together, full, rtol=1e-4, atol=1e-5, msg=lambda m, item=item: f"{item}\n{m}")


def _on(plan, axis: PlanAxis):
    return type(plan)(**{**vars(plan), "axes": (axis,)})


def _inputs(graph, plan, module: nn.Module, x: torch.Tensor, size: int) -> list[list[torch.Tensor]]:
    state = module.state_dict()
    per_input = []
    for node, item in zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True):
        placement = (plan.parameters.get(item.name) or plan.nodes[node.name].outputs[0])[0]
        full = {"batch": x, "tangent": torch.ones(node.meta["val"].shape)}.get(item.kind)
        full = state.get(item.name, graph.constants.get(item.name)) if full is None else full
        per_input.append(cut(full, placement, size))
    return [list(parts) for parts in zip(*per_input, strict=True)]


def test_shapes_are_local(fake_mesh):
    graph, placed, sharded = lowered(fake_mesh, Model(), torch.randn(4, 6))
    nodes = {node.name: node for node in sharded.graph_module.graph.nodes}
    checked = 0
    for node in graph.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and node.name in nodes:
            expected = local_shape(value.shape, placed.nodes[node.name].outputs[0], placed.axes)
            assert list(nodes[node.name].meta["val"].shape) == expected
            checked += 1
    assert checked > 30
    placeholders = {i.name: n for n, i in zip(_placeholders(sharded), graph.inputs, strict=True)}
    assert placeholders["last.weight"].meta["val"].shape == (2, 4), "three rows on two ranks are padded to two each"
    assert placeholders["first.weight"].meta["val"].shape == (4, 6)


def _placeholders(sharded) -> list:
    return sharded.graph_module.graph.find_nodes(op="placeholder")


def test_a_value_wanted_twice_is_moved_once(fake_mesh):
    module = nn.Linear(6, 6, bias=False)
    run = lambda x: (module(x).exp() + module(module(x)).sin()).sum()  # noqa: E731
    _, _, sharded = lowered(fake_mesh, module, torch.randn(4, 6), run, training=False)
    kinds = [fxn.collective_kind(node) for node in fxn.collectives_of(sharded.graph_module.graph)]
    assert kinds == ["all_gather", "all_reduce"]


def test_a_gradient_is_reduced_right_after_it_is_there(fake_mesh):
    module = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    _, _, sharded = lowered(fake_mesh, module, torch.randn(4, 6), lambda x: module(x).square().sum())
    nodes = list(sharded.graph_module.graph.nodes)
    products = [i for i, node in enumerate(nodes) if node.target is aten.mm.default and fxn.is_backward(node)]
    scatters = [i for i, node in enumerate(nodes) if fxn.collective_kind(node) == "reduce_scatter"]
    assert len(scatters) == 3
    assert scatters[0] < products[-1] and scatters[1] < products[-1], "the last layers' must not wait for the first's"


def test_a_replicated_draw_is_broadcast(fake_mesh):
    _, _, sharded = lowered(
        fake_mesh, nn.Linear(6, 6), torch.randn(4, 6), lambda x: (x * torch.rand(6)).sum(), training=False
    )
    nodes = list(sharded.graph_module.graph.nodes)
    (draw,) = [node for node in nodes if fxn.is_random(node)]
    (sent,) = draw.users
    assert sent.target is collectives.BROADCAST and sent.args[1] == 0


def test_a_sharded_draw_is_not(fake_mesh):
    _, _, sharded = lowered(
        fake_mesh, nn.Linear(6, 6), torch.randn(4, 6), lambda x: (x * torch.rand_like(x)).sum(), training=False
    )
    nodes = list(sharded.graph_module.graph.nodes)
    (draw,) = [node for node in nodes if fxn.is_random(node)]
    assert draw.meta["val"].shape == (4, 6)
    assert all(fxn.collective_kind(node) != "broadcast" for node in nodes)


def test_annotations_come_along(fake_mesh):
    """A collective belongs to the line and module whose value it moves."""
    _, _, sharded = lowered(fake_mesh, Model(), torch.randn(4, 6))
    gathers = [n for n in fxn.collectives_of(sharded.graph_module.graph) if fxn.collective_kind(n) == "all_gather"]
    assert {fxn.custom(node, "module") for node in gathers} >= {"first", "last"}
