"""Gradients of parameters that are cast after they are computed: in mixed precision they are reduced in float32."""

from __future__ import annotations

import torch
from torch import fx

from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.fx import nodes as fxn

aten = torch.ops.aten


def late_reductions(captured: CapturedGraph) -> frozenset[fx.Node]:
    """The widening casts, and the views around them, between where a gradient is computed and where it leaves.

    Reducing before such a cast would move half the bytes but add up in the narrow type.
    """
    (output,) = captured.graph_module.graph.find_nodes(op="output")
    ends = zip(output.args[0], captured.outputs, strict=True)
    late: set[fx.Node] = set()
    for node, item in ends:
        if item.is_parameter_gradient:
            late |= _tail(node)
    return frozenset(late)


def _tail(node: fx.Node) -> set[fx.Node]:
    """The casts and views that end in ``node``, up to the first widening cast; empty without one."""
    passed: list[fx.Node] = []
    while node.target is aten._to_copy.default or fxn.is_view_of_all(node):
        passed.append(node)
        source = node.all_input_nodes[0]
        if node.meta["val"].element_size() > source.meta["val"].element_size():
            return set(passed)
        node = source
    return set()
