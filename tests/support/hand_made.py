"""A hand-made graph as a capture gives it."""

from __future__ import annotations

import torch
from torch import fx

from lightning_autoparallel.contracts import CapturedGraph, GraphInput, GraphOutput


def as_captured(graph: fx.Graph, results: int = 1) -> CapturedGraph:
    """The graph of a step whose placeholders are of the batch and which gives so many ``results``."""
    return CapturedGraph(
        name="step",
        graph_module=fx.GraphModule(torch.nn.Module(), graph),
        inputs=tuple(GraphInput(kind="batch", name=node.name) for node in graph.find_nodes(op="placeholder")),
        outputs=tuple(GraphOutput(kind="output", name=str(index)) for index in range(results)),
        output_spec=None,
    )
