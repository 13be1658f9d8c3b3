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

from lightning_autoparallel.pipeline.updates_of_parts import updates_of_parts
from lightning_autoparallel.torch_compat.autograd import has_step_hooks
from lightning_autoparallel.torch_compat.dtensors import part_of

# Those that give the same bits both ways in 32 and 64 bits; ASGD, NAdam and RAdam round otherwise, as 16 bits do.
_SAME_BITS = {
    getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "RMSprop", "SGD")
}
_WIDE = (torch.float32, torch.float64)
_CHOICES = ("foreach", "fused", "differentiable", "capturable")
# All at once they hold a copy of some of their state; of more bytes than these computing takes longer than the calls.
_MOST_BYTES = 2**28


@contextlib.contextmanager
def updating(optimizer: Optimizer) -> Iterator[None]:
    """Around an update, when nobody will look any more: the optimizer takes all at once, and as plain tensors."""
    with updates_at_once(optimizer), updates_of_parts(optimizer):
        yield


@contextlib.contextmanager
def updates_at_once(optimizer: Optimizer) -> Iterator[None]:
    """Inside, groups of shards on CPUs whose user has chosen nothing have ``foreach`` on; the results are the same.

    Nobody sees it there: an optimizer whose steps somebody waits for is left alone.
    """
    may_be = type(optimizer) in _SAME_BITS and not has_step_hooks(optimizer)
    groups = [group for group in optimizer.param_groups if may_be and _may_be_at_once(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _may_be_at_once(group: Mapping[str, Any]) -> bool:
    if any(group.get(name) for name in _CHOICES) or group.get("foreach", True) is not None:
        return False
    if group.get("nesterov"):
        return False  # all at once, it writes into the gradients
    values = [value for name, value in group.items() if name != "params"]
    if any(isinstance(value, Tensor) for value in [*values, *group.get("betas", ())]):
        return False  # rates that are tensors are refused there
    return _are_few_shards([parameter for parameter in group["params"] if parameter.grad is not None])


def _are_few_shards(parameters: list[Tensor]) -> bool:
    """Whether all lie on one mesh of CPUs, their gradients with them, in few bytes; lists hold nothing but DTensors."""
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    shards = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor.device.type == "cpu"]
    if len(shards) != len(tensors) or len({shard.device_mesh for shard in shards}) != 1:
        return False
    if any(shard.dtype not in _WIDE for shard in shards):
        return False
    return sum(part_of(shard).nbytes for shard in shards[: len(parameters)]) <= _MOST_BYTES
