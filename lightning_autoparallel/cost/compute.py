"""What it costs to compute the calls of a graph, on the local shapes in ``meta["val"]``.

The larger of the time for the FLOPs, at a fraction of the datasheet's peak that ``HardwareSpec`` keeps at 75 % at
most, and the time for the bytes (``fusion.py``): the roofline model (Williams, Waterman, Patterson 2009). Time on the
host is not counted, only what a kernel's launch costs on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost.flops import node_flops
from lightning_autoparallel.cost.fusion import CallKind, call_kind, graph_kinds, graph_traffic, node_traffic
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.fx import nodes as fxn


def node_time_us(node: fx.Node, hardware: HardwareSpec) -> float:
    """Microseconds of one call, fusion judged by its neighbours alone; 0 for views, waits and collectives.

    Raises:
        UnsupportedOpError: nothing is known of the operator.
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    return _time_us(node, call_kind(node), node_traffic(node), hardware)


def graph_times_us(graph: fx.Graph, hardware: HardwareSpec) -> dict[fx.Node, float]:
    """Microseconds of every call of a graph on the compute stream.

    Raises:
        UnsupportedOpError: nothing is known of an operator.
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    kinds = graph_kinds(graph)
    traffic = graph_traffic(graph, kinds)
    return {node: _time_us(node, kind, traffic[node], hardware) for node, kind in kinds.items()}


def share_time_us(
    node: fx.Node, kind: CallKind, size_bytes: float, flops_share: float, hardware: HardwareSpec
) -> float:
    """Microseconds of a rank's part of a call: ``size_bytes`` that it moves, and that share of the call's FLOPs.

    Raises:
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    return _time_us(node, kind, size_bytes, hardware, flops_share)


def _time_us(
    node: fx.Node, kind: CallKind, size_bytes: float, hardware: HardwareSpec, flops_share: float = 1.0
) -> float:
    if kind in ("free", "collective"):
        return 0.0
    moving_us = size_bytes / (hardware.achieved_gb_per_s * 1e3)
    if kind == "fused":
        # What stays in registers is no kernel of its own.
        return max(moving_us, hardware.kernel_latency_us) if size_bytes else 0.0
    flops = node_flops(node) * flops_share
    computing_us = flops / (_achieved_tflops(node, hardware) * 1e6) if flops else 0.0
    return max(moving_us, computing_us, hardware.kernel_latency_us)


def _achieved_tflops(node: fx.Node, hardware: HardwareSpec) -> float:
    return hardware.achieved_tflops(_dtype(node), is_attention=fxn.is_attention(node))


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype that is multiplied: that of the first operand."""
    operands = [value for argument in node.all_input_nodes for value in fxn.values(argument)]
    return next(value.dtype for value in operands if isinstance(value, Tensor))
