"""Hooks between backward and update read the numbers of shards as of whole tensors, and save no shard as an object.

There whole tensors meet shards as in the optimizer's own step (``ShardedUpdates``), which sees what torch computes, and
not what leaves it for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.strategy.mixed_operands import TO_PYTHON, has_numbers
from lightning_autoparallel.strategy.outside_gradients import Asking, OutsideGradients
from lightning_autoparallel.strategy.pickled_shards import pickled
from lightning_autoparallel.torch_compat.dtensors import part_of


class ReadShards(Asking):
    """Open during such hooks; ``whole`` makes a tensor whole, together with all ranks.

    Raises:
        CaptureError: of ``whole``, by a rank alone.
        CheckpointError: a shard is saved as an object, by a rank.
    """

    def __init__(self, gradients: OutsideGradients, whole: Callable[[DTensor], Tensor]) -> None:
        super().__init__(gradients)
        self._whole = whole

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__reduce_ex__" and isinstance(args[0], DTensor):
            return pickled(*args)
        if name in TO_PYTHON and has_numbers(args[0], name):
            tensor: DTensor = args[0]
            is_whole = all(placement.is_replicate() for placement in tensor.placements)
            with torch.no_grad():
                found = func(part_of(tensor) if is_whole else self._whole(tensor), *args[1:], **(kwargs or {}))
            if isinstance(found, np.ndarray) and not is_whole:
                found.flags.writeable = False  # it is none of the tensor's memory
            return found
        return super().__torch_function__(func, types, args, kwargs)
