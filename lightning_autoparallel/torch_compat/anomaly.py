"""Autograd's anomaly mode asks every gradient whether it holds a nan, by an operator that DTensors have no rule for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_ASKED = torch.ops.aten._is_any_true.default


@contextlib.contextmanager
def shards_asked_for_nan() -> Iterator[None]:
    """Where anomaly mode is on, DTensors answer inside, on all ranks alike: one that has no nan must stop too."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with mock.patch.dict(DTensor._op_dispatcher._custom_op_handlers, {_ASKED: _any_rank}):
        yield


def _any_rank(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    (asked,) = args
    found = operator(asked.to_local()).to(torch.uint8)
    for axis in range(asked.device_mesh.ndim):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=asked.device_mesh.get_group(axis))
    return found.bool()
