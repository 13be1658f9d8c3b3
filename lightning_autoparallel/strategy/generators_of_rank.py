"""The generators that loaders, hooks and steps draw from, as one thing that ranks can compare and hand on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.generators import generator_state, set_generator_state

States = tuple[Any, Any, list[Tensor]]  # of Python's generator, numpy's, and torch's on each device
_HOST = torch.device("cpu")


class Generators:
    """Python's, numpy's, and torch's of the host and of this rank's ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._devices = (_HOST,) if device.type == "cpu" else (_HOST, device)

    def states(self) -> States:
        """Where they stand; no device is waited for."""
        tensors = [generator_state(device) for device in self._devices]
        return random.getstate(), np.random.get_state(legacy=False), tensors

    def set(self, states: States) -> None:
        """Go on from there."""
        python, arrays, tensors = states
        random.setstate(python)
        np.random.set_state(arrays)
        for device, state in zip(self._devices, tensors, strict=True):
            set_generator_state(device, state)

    def spelled(self) -> str:
        """Where they stand, in few characters."""
        python, arrays, tensors = self.states()
        found = hashlib.blake2b(
            repr(hash(python[1])).encode(), digest_size=8
        )  # of whole numbers: alike in all processes
        found.update(repr((python[0], python[2])).encode())
        _feed(found, arrays)
        for state in tensors:
            found.update(state.numpy().tobytes())
        return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for name in sorted(value):
            found.update(str(name).encode())
            _feed(found, value[name])
    else:
        found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
