"""Operator rules of fused attention: (B, H, T, D) tensors by batch or by heads, and masks that these may share.

Those of CUDA's flash and efficient kernels are DTensor's. cuDNN's are here: it takes masks as they come, where the
efficient kernel is given one of (B, H, T, S), which DTensor's rules expect of both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.plan.rules import OpCall, R, Row, S, rule
from lightning_autoparallel.torch_compat.schemas import named_arguments

aten = torch.ops.aten

_ROWS, _HEADS = 0, 1
_OF_ROWS_AND_HEADS = ("grad_out", "query", "key", "value", "out", "logsumexp")
_MASKS = ("attn_mask", "attn_bias")
_FORWARD_RESULTS = 2  # the output and its log-sum-exp; what follows is the state of the rank's generator


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
def attention_rule(call: OpCall) -> list[Row]:
    """(B, H, T, D) tensors by batch or by heads."""
    named = named_arguments(call.op, call.args, call.kwargs)
    given = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    results = len(call.outputs) if "grad_out" in given else _FORWARD_RESULTS
    rows: list[Row] = []
    for dim in (_ROWS, _HEADS):
        outputs = tuple(
            (S(dim) if i < results else R) if out is not None else None for i, out in enumerate(call.outputs)
        )
        rows.append((outputs, tuple(_argument(name, tensor, dim) for name, tensor in given.items())))
    return rows


def _argument(name: str, tensor: Tensor, dim: int) -> Placement:
    if name in _MASKS:  # one of fewer dims, or of size 1 there, is shared by all rows or heads
        return S(dim) if tensor.dim() == 4 and tensor.shape[dim] != 1 else R
    return S(dim) if name in _OF_ROWS_AND_HEADS else R
