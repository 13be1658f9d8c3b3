"""Graphs and hardware of round numbers, on which times can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost import GroupShape, HardwareSpec, LinkSpec
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten

# 1 byte takes 1 ns of memory, 1 FLOP 1 ps; a link moves 1000 bytes per microsecond.
ROUND = HardwareSpec(
    name="round",
    peak_tflops={"float32": 2.0, "bfloat16": 4.0},
    matmul_fraction=0.5,
    attention_fraction=0.25,
    memory_gb_per_s=2.0,
    memory_fraction=0.5,
    memory_bytes=10**9,
    kernel_latency_us=0.25,
    launch_latency_us=10.0,
    intra_node=LinkSpec(bandwidth_gb_per_s=1.0, latency_us=2.0),
    inter_node=LinkSpec(bandwidth_gb_per_s=0.25, latency_us=5.0),
)
PAIR = {"pair": GroupShape(ranks=2), "other": GroupShape(ranks=2)}


class Builder:
    """Builds a graph whose calls carry fake values on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, its value computed on meta."""
        values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        return self.valued(op(*values, **named), op, *args, **kwargs)

    def valued(self, value: Any, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of which the value is given."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = value
        return node

    def gather(self, shard: fx.Node, ranks: int, group: str) -> fx.Node:
        """The start of an all-gather."""
        local: Tensor = shard.meta["val"]
        whole = local.new_empty(local.shape[0] * ranks, *local.shape[1:])
        return self.valued(whole, collectives.ALL_GATHER, shard, ranks, group)

    def wait(self, started: fx.Node) -> fx.Node:
        """The wait for a collective."""
        return self.valued(started.meta["val"], collectives.WAIT, started)

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(list(nodes))
        return self.graph
