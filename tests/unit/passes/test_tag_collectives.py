"""Gathers of parameters and reductions that only leave the graph are tagged, and the tags outlive the partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.contracts import GraphInput, GraphOutput, ShardedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.tag_collectives import tag_collectives
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten
PARAMETER, BATCH, TANGENT = (GraphInput(kind=kind, name=kind) for kind in ("parameter", "batch", "tangent"))
GRADIENT, LOG, OUTPUT = (GraphOutput(kind=kind, name=kind) for kind in ("gradient", "log", "output"))


class Draft:
    """A graph of (4, 4) tensors; collectives come with their waits."""

    def __init__(self, *inputs: GraphInput) -> None:
        self.graph = fx.Graph()
        self.inputs = inputs
        self.placeholders = [self._valued(self.graph.placeholder(f"x{i}")) for i in range(len(inputs))]

    def _valued(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = torch.empty(4, 4)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self._valued(self.graph.call_function(target, args))

    def gather(self, value: fx.Node, group: str = "g") -> fx.Node:
        return self.call(collectives.WAIT, self.call(collectives.ALL_GATHER, value, 2, group))

    def scatter(self, value: fx.Node) -> fx.Node:
        return self.call(collectives.WAIT, self.call(collectives.REDUCE_SCATTER, value, "sum", 2, "g"))

    def reduce(self, value: fx.Node) -> fx.Node:
        return self.call(collectives.WAIT, self.call(collectives.ALL_REDUCE, value, "sum", "g"))

    def tag(self, results: Any, *outputs: GraphOutput) -> tuple[str, ...]:
        self.graph.output(results)
        return tag_collectives(self.graph, inputs=self.inputs, outputs=outputs)


def role(wait: fx.Node) -> str | None:
    """What the collective that ``wait`` waits for is tagged as."""
    return fxn.collective_role(wait.all_input_nodes[0])


def test_only_what_depends_on_one_parameter_is_a_parameter_gather():
    draft = Draft(PARAMETER, PARAMETER, BATCH)
    first, second, x = draft.placeholders
    cast = draft.call(aten.neg.default, first)
    ones = [draft.gather(cast), draft.gather(draft.gather(second), "h")]
    others = [
        draft.gather(draft.call(aten.add.Tensor, first, second)),
        draft.gather(x),
        draft.gather(draft.call(aten.mul.Tensor, first, x)),
        draft.gather(draft.call(aten.bernoulli.default, first)),
    ]
    notes = draft.tag([*ones, *others], *[OUTPUT] * 6)
    assert [role(wait) for wait in ones] == ["parameter_gather"] * 2
    assert [role(wait) for wait in others] == [None] * 4
    assert notes == ("3 gathers of parameters",)


def test_a_reduction_is_terminal_if_its_result_only_leaves_the_graph():
    draft = Draft(BATCH, BATCH)
    x, y = draft.placeholders
    leaving = draft.reduce(x)
    seen = draft.call(aten.view.default, leaving, [16])
    used = draft.reduce(y)
    replicas = draft.reduce(draft.call(aten.neg.default, draft.scatter(y)))
    (scattered,) = [node for node in fxn.collectives_of(draft.graph) if fxn.collective_kind(node) == "reduce_scatter"]
    notes = draft.tag([seen, used, draft.call(aten.mul.Tensor, used, x), replicas], LOG, LOG, OUTPUT, GRADIENT)
    assert role(leaving) == role(replicas) == fxn.collective_role(scattered) == "terminal_reduction"
    assert role(used) is None
    assert notes == ("2 reductions of gradients, 1 reductions of other results",)


def test_a_nested_output_is_read_leaf_by_leaf():
    draft = Draft(BATCH, BATCH)
    x, y = draft.placeholders
    log, gradient = draft.reduce(x), draft.reduce(y)
    nested = {"loss": [x, (None, log)], "gradients": ({"w": gradient},)}
    notes = draft.tag(nested, OUTPUT, OUTPUT, LOG, GRADIENT)
    assert role(log) == role(gradient) == "terminal_reduction"
    assert notes == ("1 reductions of gradients, 1 reductions of other results",)


@pytest.mark.parametrize("outputs", [(LOG,), (LOG, OUTPUT, GRADIENT)], ids=["too few", "too many"])
def test_descriptors_are_one_to_one_with_the_leaves(outputs: tuple[GraphOutput, ...]):
    draft = Draft(BATCH)
    (x,) = draft.placeholders
    with pytest.raises(ValueError, match="zip"):
        draft.tag([draft.reduce(x), [x]], *outputs)


def test_descriptors_are_one_to_one_with_the_inputs():
    draft = Draft(BATCH)
    draft.graph.output([])
    with pytest.raises(ValueError, match="zip"):
        tag_collectives(draft.graph, inputs=(BATCH, PARAMETER), outputs=())


def test_tags_outlive_the_partition_and_gathers_made_again_have_them_too():
    draft = Draft(PARAMETER, BATCH, TANGENT)
    shard, x, tangent = draft.placeholders
    weight = draft.gather(shard)
    loss = draft.call(aten.mm.default, x, weight)
    for node in (first := tangent, second := draft.call(aten.mm.default, tangent, weight)):
        node.meta["partitioner_tag"] = "is_backward"
    gradient = draft.scatter(draft.call(aten.mm.default, first, second))
    draft.tag([loss, gradient], OUTPUT, GRADIENT)
    halves = partition_graph(
        ShardedGraph(
            name="step",
            graph_module=fx.GraphModule(torch.nn.Module(), draft.graph),
            inputs=draft.inputs,
            outputs=(OUTPUT, GRADIENT),
            output_placements=(None, None),
            axes=(),
            has_backward=True,
        )
    )
    found = [
        [fxn.collective_role(node) for node in fxn.collectives_of(half.graph)]
        for half in (halves.forward, halves.backward)
    ]
    assert found == [["parameter_gather"], ["parameter_gather", "terminal_reduction"]]
