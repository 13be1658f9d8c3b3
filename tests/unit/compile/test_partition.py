"""What the forward saves and what the backward computes again, on hand-made joint graphs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.contracts import GraphOutput, PartitionedGraph, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn
from tests.unit.compile.joint import Joint, recomputed_of

aten = torch.ops.aten


def saved_of(partitioned: PartitionedGraph) -> list[str]:
    (output,) = partitioned.forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    return [node.name for node in results[len(results) - partitioned.saved_values :]]


def recomputed_names(partitioned: PartitionedGraph) -> set[str]:
    return {node.name for node in recomputed_of(partitioned)}


CHAINS = {
    "plain": lambda joint, w: w,
    "cast": lambda joint, w: joint(
        aten._to_copy.default, joint(aten._to_copy.default, w, dtype=torch.float64), dtype=torch.float32
    ),
    "permute": lambda joint, w: joint(aten.clone.default, joint(aten.permute.default, w, [1, 0])),
    "slice": lambda joint, w: joint(aten.slice.Tensor, w, 0, 0, 4),
    "scaled": lambda joint, w: joint(aten.mul.Tensor, joint(aten.neg.default, w), 0.5),
}


def gathered_layer(chain) -> tuple[Joint, fx.Node, fx.Node]:
    """y = x @ chain(gather(w)); its backward needs chain(gather(w)) again."""
    joint = Joint()
    weight = chain(joint, joint.gathered())
    y = joint(aten.mm.default, joint["x"], weight)
    grad = joint(aten.mm.default, joint["t"], joint(aten.t.default, weight))
    return joint, y, grad


@pytest.mark.parametrize("name", CHAINS)
def test_what_holds_a_gathered_parameter_is_never_saved(name: str):
    joint, y, grad = gathered_layer(CHAINS[name])
    partitioned = joint.split(y, grad)
    assert saved_of(partitioned) == []
    assert partitioned.saved_inputs == (joint.order.index("w"),), "the shard is kept, and gathered again"
    kinds = [fxn.collective_kind(node) for node in fxn.collectives_of(partitioned.backward.graph)]
    assert kinds == ["all_gather"]


@pytest.mark.parametrize("name", CHAINS)
def test_without_resharding_it_is_kept(name: str):
    joint, y, grad = gathered_layer(CHAINS[name])
    partitioned = joint.split(y, grad, reshard=False)
    assert list(fxn.collectives_of(partitioned.backward.graph)) == []
    assert partitioned.saved_values == 1


def test_values_that_mix_in_the_batch_are_saved():
    joint = Joint()
    hidden = joint(aten.mul.Tensor, joint["x"], joint.gathered())
    y = joint(aten.exp.default, hidden)
    partitioned = joint.split(y, joint(aten.mul.Tensor, joint["t"], y))
    assert saved_of(partitioned) == [y.name]
    assert recomputed_names(partitioned) == set()


def test_a_checkpoint_region_is_recomputed_from_its_boundary():
    joint = Joint()
    before = joint(aten.sin.default, joint["x"])
    joint.region = 0
    inside = joint(aten.exp.default, before)
    inner = joint(aten.cos.default, inside)
    joint.region = None
    y = joint(aten.relu.default, inner)
    grad = joint(aten.mul.Tensor, joint(aten.mul.Tensor, joint["t"], inside), inner)
    partitioned = joint.split(y, grad)
    assert inside.name in recomputed_names(partitioned)
    assert set(saved_of(partitioned)) == {before.name, inner.name}, "what leaves the region is saved, as is what enters"


def test_a_random_draw_is_never_repeated():
    joint = Joint()
    joint.region = 0
    drawn = joint(aten.rand.default, [4, 4])
    mask = joint(aten.gt.Scalar, drawn, 0.5)
    kept = joint(aten.mul.Tensor, joint["x"], mask)
    joint.region = None
    y = joint(aten.relu.default, kept)
    partitioned = joint.split(y, joint(aten.mul.Tensor, joint["t"], mask))
    assert saved_of(partitioned) == [drawn.name]
    assert recomputed_names(partitioned) == {mask.name}
    assert not any(fxn.is_random(node) for node in partitioned.backward.graph.nodes)


def test_one_result_of_several_is_saved_alone():
    joint = Joint()
    both = joint(aten.max.dim, joint["x"], 1)
    highest, places = (joint(operator.getitem, both, i) for i in range(2))
    grad = joint(aten.mul.Tensor, joint["t"], joint(aten.unsqueeze.default, places, 1))
    partitioned = joint.split(highest, grad)
    assert saved_of(partitioned) == [places.name]
    assert partitioned.backward.graph.find_nodes(op="call_function", target=aten.max.dim) == []


def test_a_region_repeats_an_operator_with_several_results():
    joint = Joint()
    joint.region = 3
    both = joint(aten.max.dim, joint["x"], 1)
    highest, places = (joint(operator.getitem, both, i) for i in range(2))
    joint.region = None
    y = joint(aten.neg.default, highest)
    grad = joint(aten.mul.Tensor, joint["t"], joint(aten.unsqueeze.default, places, 1))
    partitioned = joint.split(y, grad)
    assert saved_of(partitioned) == []
    assert both.name in recomputed_names(partitioned)


@pytest.mark.parametrize("order", [("w", "x", "t"), ("t", "x", "w"), ("x", "t", "w")], ids=str)
def test_saved_inputs_are_positions_among_all_inputs(order: tuple[str, ...]):
    joint = Joint(*order)
    y = joint(aten.mul.Tensor, joint["x"], joint.gathered())
    partitioned = joint.split(y, joint(aten.mul.Tensor, joint["t"], joint["x"]))
    assert [order[i] for i in partitioned.saved_inputs] == ["x"]
    assert partitioned.saved_values == 0


def test_views_are_made_again():
    joint = Joint()
    hidden = joint(aten.exp.default, joint["x"])
    turned = joint(aten.t.default, hidden)
    partitioned = joint.split(joint(aten.relu.default, turned), joint(aten.mul.Tensor, joint["t"], turned))
    assert saved_of(partitioned) == [hidden.name]


def test_without_a_backward_the_graph_stays_whole():
    joint = Joint("x")
    joint.graph.output([joint(aten.exp.default, joint["x"])])
    module = fx.GraphModule(torch.nn.Module(), joint.graph)
    outputs = (GraphOutput(kind="output", name="0"),)
    sharded = ShardedGraph(
        name="step", graph_module=module, inputs=joint.inputs, outputs=outputs, output_placements=(None,), axes=(),
        has_backward=False,
    )  # fmt: skip
    partitioned = partition_graph(sharded)
    assert partitioned.forward is module and partitioned.backward is None
    assert isinstance(joint.values["x"], Tensor)
