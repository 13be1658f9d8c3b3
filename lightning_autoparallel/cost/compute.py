"""What it costs to compute an operator on a share of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.fx.nodes import VIEWS


def operator_time_us(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    local_bytes: int,
    share: float,
    hardware: HardwareSpec,
) -> float:
    """Microseconds to run ``op``: the larger of its FLOPs and its memory traffic.

    ``args`` and ``result`` are global fake tensors, ``share`` the part of the FLOPs that this rank does,
    ``local_bytes`` what it reads and writes.
    """
    if op in VIEWS:
        return 0.0
    flops = operator_flops(op, args, kwargs, result)
    return max(flops * share / (hardware.matmul_tflops * 1e6), local_bytes / (hardware.memory_gb_per_s * 1e3))


def operator_flops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of the operators that torch's counter knows; 0 for the others, which are bound by memory."""
    if op is torch.ops.aten.einsum.default:
        return 2 * math.prod(_letter_sizes(*args).values())
    packet = getattr(op, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def _letter_sizes(equation: str, operands: Sequence[Tensor]) -> dict[str, int]:
    terms = equation.split("->")[0].split(",")
    return {
        letter: size
        for term, operand in zip(terms, operands, strict=True)
        for letter, size in zip(term, operand.shape, strict=True)
    }


def local_size_bytes(tensors: Sequence[Tensor | None], shards: Sequence[int]) -> int:
    """Bytes of one rank's part of ``tensors``, each cut into the given number of shards."""
    return sum(
        tensor.numel() * tensor.element_size() // shard
        for tensor, shard in zip(tensors, shards, strict=True)
        if tensor is not None
    )
