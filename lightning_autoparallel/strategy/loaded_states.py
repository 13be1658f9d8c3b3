"""States of optimizers that user code loads: whole ones, as one device has them, of parameters that lie in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.apply import sharded_state


@contextlib.contextmanager
def loaded_as_parameters_lie() -> Iterator[None]:
    """Inside, ``Optimizer.load_state_dict`` leaves each rank its part of what it is given; every rank is given all."""
    original = Optimizer.load_state_dict

    def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        original(optimizer, state_dict)
        for parameter, kept in optimizer.state.items():
            if isinstance(parameter, DTensor):
                kept.update(
                    {key: sharded_state(parameter, key, value) for key, value in kept.items() if _is_plain(value)}
                )

    with mock.patch.object(Optimizer, "load_state_dict", load):
        yield


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)
