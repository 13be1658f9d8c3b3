"""Joint graphs made by hand, and the check that both halves together compute what the whole does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.contracts import GraphInput, GraphOutput, PartitionedGraph, ShardedGraph
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import one_group, run_lockstep

SIZE = 2


def recomputed_of(partitioned: PartitionedGraph) -> list[fx.Node]:
    """The calls of the forward that the backward makes again, in its order: the partition keeps names."""
    calls = [node for node in partitioned.backward.graph.nodes if node.op == "call_function"]
    return [node for node in calls if node.name in partitioned.decisions]


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
