"""Numbers of Python on their way to a device: made there, not copied, so that nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_autoparallel.lightning_compat import LightningModule

_EXACT = 2**53  # integers up to here are doubles; a device is given a double


def with_numbers_on(device: torch.device, log: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` of ``LightningModule.log`` or ``log_dict``, numbers as the 0-dim tensors that Lightning makes of them.

    Lightning copies each number by itself from the host, and waits for that. On a CPU, and of other functions,
    arguments are returned as they are.
    """
    position = {LightningModule.log: 2, LightningModule.log_dict: 1}.get(log)
    if device.type == "cpu" or position is None or position >= len(args):
        return args
    value = args[position]
    made = {name: _made(device, one) for name, one in value.items()} if type(value) is dict else _made(device, value)
    return (*args[:position], made, *args[position + 1 :])


def _made(device: torch.device, value: Any) -> Any:
    dtype = torch.get_default_dtype()
    if type(value) not in (int, float) or (type(value) is int and abs(value) > _EXACT):
        return value
    if math.isfinite(value) and abs(value) > torch.finfo(dtype).max:
        return value  # a copy is infinite, where filling refuses
    return torch.full((), value, dtype=dtype, device=device)
