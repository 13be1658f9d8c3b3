"""What the forward saves and what the backward computes again, on hand-made joint graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.contracts import GraphInput, GraphOutput, PartitionedGraph, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat import collectives
from tests.lockstep import one_group, run_lockstep

aten = torch.ops.aten
SIZE = 2


class Joint:
    """A joint graph under construction: inputs x (batch), w (parameter, sharded), t (tangent)."""

    def __init__(self, *order: str) -> None:
        self.graph = fx.Graph()
        self.values = {"x": torch.randn(4, 4), "w": torch.randn(2, 4), "t": torch.randn(4, 4)}
        kinds = {"x": "batch", "w": "parameter", "t": "tangent"}
        self.order = order or ("w", "x", "t")
        self.inputs = tuple(GraphInput(kind=kinds[name], name="0" if name == "t" else name) for name in self.order)
        self.nodes = {name: self._placeholder(name) for name in self.order}
        self.region: int | None = None

    def _placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.values[name]
        return node

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake = fx.map_arg(args, lambda argument: argument.meta["val"])
        node.meta["val"] = self._value(target, fake, kwargs)
        if self.region is not None:
            node.meta["custom"] = {"checkpoint_region": self.region}
        return node

    def _value(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if target is collectives.ALL_GATHER:
            return torch.cat([args[0]] * SIZE)
        return args[0] if target is collectives.WAIT else target(*args, **kwargs)

    def gathered(self) -> fx.Node:
        return self(collectives.WAIT, self(collectives.ALL_GATHER, self["w"], SIZE, "g"))

    def split(self, result: fx.Node, gradient: fx.Node, reshard: bool = True) -> PartitionedGraph:
        self.graph.output([result, gradient])
        outputs = (GraphOutput(kind="output", name="0"), GraphOutput(kind="gradient", name="w"))
        sharded = ShardedGraph(
            name="step",
            graph_module=fx.GraphModule(torch.nn.Module(), self.graph),
            inputs=self.inputs,
            outputs=outputs,
            output_placements=(None, None),
            axes=(),
            has_backward=True,
        )
        partitioned = partition_graph(sharded, reshard)
        self.check(partitioned)
        return partitioned

    def check(self, partitioned: PartitionedGraph) -> None:
        """Both halves together must compute what the joint graph does."""
        values = [self.values[name] for name in self.order]
        torch.manual_seed(0)
        expected = run_lockstep([self.graph] * SIZE, [values] * SIZE, one_group("g", SIZE))[0]
        given = [value for name, value in zip(self.order, values, strict=True) if name != "t"]
        torch.manual_seed(0)
        forward = run_lockstep([partitioned.forward.graph] * SIZE, [given] * SIZE, one_group("g", SIZE))[0]
        assert torch.equal(forward[0], expected[0])
        saved = [values[i] for i in partitioned.saved_inputs] + forward[1:]
        assert len(forward) == 1 + partitioned.saved_values
        backward = run_lockstep(
            [partitioned.backward.graph] * SIZE, [[*saved, self.values["t"]]] * SIZE, one_group("g", SIZE)
        )
        assert torch.equal(backward[0][0], expected[1])


def saved_of(partitioned: PartitionedGraph) -> list[str]:
    (output,) = partitioned.forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    return [node.name for node in results[len(results) - partitioned.saved_values :]]


def recomputed_of(partitioned: PartitionedGraph) -> set[str]:
    return {node.name for node in partitioned.backward.graph.nodes if node.meta.get("recomputed")}


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
    assert recomputed_of(partitioned) == set()


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
    assert inside.name in recomputed_of(partitioned)
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
    assert recomputed_of(partitioned) == {mask.name}
    assert not any(fxn.is_random(node) for node in partitioned.backward.graph.nodes)


@pytest.mark.xfail(strict=True, reason="a result that only the backward reads makes it run the operator again")
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
    assert both.name in recomputed_of(partitioned)


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
