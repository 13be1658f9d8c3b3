"""What it costs to compute the calls of a graph, on the local shapes in ``meta["val"]``.

The larger of the time for the FLOPs, at a fraction of the datasheet's peak that ``HardwareSpec`` keeps at 75 % at
most, and the time for the bytes (``fusion.py``): the roofline model (Williams, Waterman, Patterson 2009). Where it was
measured, what attention and convolutions do per element of their operands adds to the time for their FLOPs: short
sequences and few channels leave few FLOPs for each. Time on the host is not counted, only what a kernel's launch costs
on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost.flops import counts_flops, node_flops
from lightning_autoparallel.cost.fusion import CallKind, call_kind, graph_kinds, graph_traffic, node_traffic
from lightning_autoparallel.cost.hardware import HardwareSpec, Work
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.schemas import named_arguments

_NEEDED_SHARE = 0.5  # of the pairs of causal attention


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

    Plans compare such times. Where the hardware has no peak for the dtype of a product, that of a dtype like it is
    taken: see ``HardwareSpec.rated_dtype``.
    """
    return _time_us(node, kind, size_bytes, hardware, flops_share, hardware.rated_dtype)


def unrated_dtypes(graph: fx.Graph, hardware: HardwareSpec) -> list[torch.dtype]:
    """Of products, convolutions and attention for which the hardware has no peak."""
    dtypes = dict.fromkeys(_dtype(node) for node in graph.nodes if counts_flops(node))
    return [dtype for dtype in dtypes if hardware.rated_dtype(dtype) != dtype]


def _time_us(
    node: fx.Node,
    kind: CallKind,
    size_bytes: float,
    hardware: HardwareSpec,
    flops_share: float = 1.0,
    rated: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> float:
    if kind in ("free", "collective"):
        return 0.0
    moving_us = size_bytes / (hardware.achieved_gb_per_s * 1e3)
    if kind == "fused":
        # What stays in registers is no kernel of its own.
        return max(moving_us, hardware.kernel_latency_us) if size_bytes else 0.0
    flops = node_flops(node) * flops_share
    computing_us = 0.0
    if flops:
        dtype = rated(_dtype(node))
        computing_us = computing_time_us(flops, size_bytes, dtype, _work(node), hardware, _is_causal(node))
    return max(moving_us, computing_us, hardware.kernel_latency_us)


def computing_time_us(
    flops: float, size_bytes: float, dtype: torch.dtype, work: Work, hardware: HardwareSpec, is_causal: bool
) -> float:
    """Microseconds of computing so many FLOPs, of which causal attention counts half of its pairs.

    ``size_bytes`` are read and written.

    Raises:
        ConfigError: the hardware has no peak for the dtype.
    """
    computed = flops * hardware.causal_share / _NEEDED_SHARE if is_causal else flops
    return computed / (hardware.achieved_tflops(dtype, work) * 1e6) + hardware.operand_time_us(size_bytes, dtype, work)


def _work(node: fx.Node) -> Work:
    if fxn.is_attention(node):
        return "attention"
    return "convolution" if "convolution" in str(node.target) else "product"


def _is_causal(node: fx.Node) -> bool:
    return fxn.is_attention(node) and bool(named_arguments(node.target, node.args, node.kwargs).get("is_causal"))


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype that is multiplied: that of the first operand."""
    operands = [value for argument in node.all_input_nodes for value in fxn.values(argument)]
    return next(value.dtype for value in operands if isinstance(value, Tensor))
