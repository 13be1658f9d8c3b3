"""Torch's optimizers update shards on CPUs with one call per operator for all parameters, as they do on GPUs.

Left to choose, they update parameters on CPUs one by one. What a call on a DTensor takes besides computing, tens of
microseconds, would be paid a dozen times for each parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Those that give the same bits both ways; ASGD, NAdam and RAdam round otherwise.
_SAME_BITS = {
    getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "RMSprop", "SGD")
}
_CHOICES = ("foreach", "fused", "differentiable", "capturable")
# All at once they hold a copy of some of their state; of more bytes than these computing takes longer than the calls.
_MOST_BYTES = 2**28


@contextlib.contextmanager
def updates_at_once(optimizer: Optimizer) -> Iterator[None]:
    """Inside, groups of shards on CPUs whose user has chosen nothing have ``foreach`` on; the results are the same."""
    groups = [group for group in optimizer.param_groups if type(optimizer) in _SAME_BITS and _may_be(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _may_be(group: Mapping[str, Any]) -> bool:
    if any(group.get(name) for name in _CHOICES) or group.get("foreach", True) is not None:
        return False
    if any(isinstance(value, Tensor) for name, value in group.items() if name != "params"):
        return False  # rates that are tensors are refused there
    betas = group.get("betas", ())
    if any(isinstance(beta, Tensor) for beta in betas):
        return False
    return _are_small_shards([parameter for parameter in group["params"] if parameter.grad is not None])


def _are_small_shards(parameters: list[Tensor]) -> bool:
    """Whether all lie on one mesh of CPUs, their gradients with them; torch's lists hold no others beside DTensors."""
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    shards = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor.device.type == "cpu"]
    if len(shards) != len(tensors) or len({shard.device_mesh for shard in shards}) != 1:
        return False
    return sum(shard.to_local().nbytes for shard in shards[: len(parameters)]) <= _MOST_BYTES
