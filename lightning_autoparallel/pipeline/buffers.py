"""Buffers that each rank changes by its own rows: steps start from those of the first batch shard, as under DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autoparallel.pipeline.stages import StageContext


class SharedBuffers:
    """The buffers of one module, sent to all batch shards when some rank's have changed: one launch for each dtype."""

    def __init__(self, module: nn.Module, context: StageContext) -> None:
        self._module, self._mesh, self._control = module, context.mesh, context.control
        self._versions: list[tuple[int, int]] = []

    def share(self) -> None:
        """Take over the first batch shard's values; every rank calls it alike."""
        buffers = list(self._module.buffers())
        if self._mesh.data_parallel_size == 1 or not buffers:
            return
        same = _versions(buffers) == self._versions
        if self._control.agrees(str(same)) and same:
            return
        group = self._mesh.submesh(self._mesh.data_parallel_axes).get_group()
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            _send([buffer for buffer in buffers if buffer.dtype == dtype], group)
        self._versions = _versions(buffers)


def _versions(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in buffers]


def _send(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    joined = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
    dist.broadcast(joined, group=group, group_src=0)
    for buffer, values in zip(buffers, joined.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.detach().copy_(values.view(buffer.shape))
