"""A step that a tracer can see into: its halves interpreted node by node, each node marked with its half."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch.fx.traceback as fx_traceback
from torch import fx

from lightning_autoparallel.contracts import CompiledStep, GraphCallable
from lightning_autoparallel.fx import nodes as fxn

Half = Literal["forward", "backward"]
HALF_KEY = "half"


def retraceable(step: CompiledStep) -> CompiledStep:
    """``step`` with graphs in place of what they were lowered to.

    Traced again, every node keeps its annotations and is marked with the half that the first partition put it in; a
    recomputed node is of the backward.
    """
    partitioned = step.partitioned
    backward = None if partitioned.backward is None else _interpreted(partitioned.backward, "backward")
    return dataclasses.replace(step, forward=_interpreted(partitioned.forward, "forward"), backward=backward)


def half_of(node: fx.Node) -> Half | None:
    """The half that the first partition put a retraced node in; None for nodes that it did not know."""
    half: Half | None = fxn.custom(node, HALF_KEY)
    return half


def _interpreted(graph_module: fx.GraphModule, half: Half) -> GraphCallable:
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        # Nodes share their annotations with the graph that they are copied from: each gets its own.
        node.meta = {**node.meta, "custom": {**(node.meta.get("custom") or {}), HALF_KEY: half}}
    marked = fx.GraphModule(graph_module, graph)

    def run(arguments: list[object]) -> object:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(marked).run(*arguments)

    return run
