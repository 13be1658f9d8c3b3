"""Tensors that a hook saves by itself: whole ones as plain tensors; of shards a file would hold one rank's part."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CheckpointError


def pickled(tensor: DTensor, protocol: Any) -> Any:
    """What ``__reduce_ex__`` gives of a tensor of which this rank has all, as of one that lies on one device.

    Raises:
        CheckpointError: other ranks have parts of it.
    """
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise CheckpointError(
            f"{user_line()} saves or copies a tensor of shape {tuple(tensor.shape)} as an object, of which this rank "
            f"has {tuple(tensor.to_local().shape)} and others the rest: the file would lack theirs, without a word. "
            "Save by trainer.save_checkpoint(path), or make it whole before, both on all ranks: tensor.full_tensor()"
        )
    local = tensor.to_local().detach()
    is_parameter = isinstance(tensor, nn.Parameter)
    plain = nn.Parameter(local, tensor.requires_grad) if is_parameter else local
    return plain.__reduce_ex__(protocol)
