"""Torch's optimizers update this rank's parts as the plain tensors that they are.

An operator on DTensors takes tens of microseconds besides computing, and an update has a dozen for each parameter.
Where an optimizer works element by element it computes the same on parts: its groups hold those while it steps.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.pipeline.sharded_updates import needs_no_help
from lightning_autoparallel.torch_compat.autograd import is_stepped_by_torch
from lightning_autoparallel.torch_compat.dtensors import as_described, is_placed_alike, part_of

# State that is one number whatever the parameter is.
_NUMBERS = {"step", "mu", "mu_product", "eta"}
Parts = list[tuple[DTensor, Tensor]]


@contextlib.contextmanager
def updates_of_parts(optimizer: Optimizer) -> Iterator[None]:
    """Inside, parameters with gradients are this rank's parts, with theirs and with their state; then shards again.

    Nobody but torch's optimizer sees them: one whose step is of another's writing, or waited for, is left alone.
    """
    parts = _parts(optimizer)
    if not parts:
        yield
        return
    lists, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    try:
        _give(optimizer, parts)
        yield
    finally:
        kept, optimizer.state = optimizer.state, state
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        for parameter, part in parts:
            part.grad = None
            if (kept_for_part := kept.get(part)) is not None:
                _take(kept_for_part, state[parameter], parameter)
        increment_version([parameter for parameter, _ in parts])  # who saved one for a backward is told, as ever


def _parts(optimizer: Optimizer) -> Parts:
    """Every shard that has a gradient with this rank's part; none where the update may not be of parts."""
    may_be = needs_no_help(optimizer) and is_stepped_by_torch(optimizer)
    if not may_be or any(_is_unlike_numbers(group) for group in optimizer.param_groups):
        return []
    parts = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not isinstance(parameter, DTensor) or not is_placed_alike(parameter, gradient):
                return []
            if gradient.dtype != parameter.dtype:
                return []  # a part could not have it
            if not _has_state_alike(parameter, optimizer.state.get(parameter)):
                return []
            parts[part_of(parameter)] = parameter
    return [(parameter, part) for part, parameter in parts.items()]


def _is_unlike_numbers(group: Mapping[str, Any]) -> bool:
    """Whether a choice of its user's is a DTensor itself, or is to be differentiated."""
    values = [value for name, value in group.items() if name != "params"]
    return bool(group.get("differentiable")) or any(isinstance(v, DTensor) for v in [*values, *group.get("betas", ())])


def _has_state_alike(parameter: DTensor, state: Mapping[str, Any] | None) -> bool:
    """Whether what is kept for a parameter are numbers, and tensors that are cut as it is."""
    for value in state.values() if state else ():
        if isinstance(value, Tensor) and value.dim() and not is_placed_alike(parameter, value):
            return False
    return True


def _give(optimizer: Optimizer, parts: Parts) -> None:
    by_parameter = {id(parameter): part for parameter, part in parts}
    for group in optimizer.param_groups:
        group["params"] = [by_parameter.get(id(parameter), parameter) for parameter in group["params"]]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    for parameter, part in parts:
        part.grad = part_of(parameter.grad)  # type: ignore[arg-type]
        kept = state.get(parameter)
        if kept is not None:
            optimizer.state[part] = {n: part_of(v) if isinstance(v, DTensor) else v for n, v in kept.items()}


def _take(kept: Mapping[str, Any], state: dict[str, Any], parameter: DTensor) -> None:
    """What the optimizer now keeps for a part, kept for its parameter."""
    for name, value in kept.items():
        before = state.get(name)
        if before is value or (isinstance(before, DTensor) and part_of(before) is value):
            continue
        is_part = isinstance(value, Tensor) and name not in _NUMBERS and value.shape == part_of(parameter).shape
        state[name] = as_described(value, parameter) if is_part else value
    for name in [name for name in state if name not in kept] if len(state) > len(kept) else ():
        del state[name]
