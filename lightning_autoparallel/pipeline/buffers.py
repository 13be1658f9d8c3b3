"""Buffers that each rank changes by its own rows: steps start from those of the first batch shard, as under DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autoparallel.fx.values import Snapshot
from lightning_autoparallel.pipeline.stages import StageContext


class SharedBuffers:
    """The buffers of one module, sent to all batch shards when some rank's have changed: one launch for each dtype.

    DDP sends them before each step. Here writes that torch does not count (``buffer.data``) are seen on the host only,
    in buffers of up to 1 MiB: ``Snapshot`` says why.
    """

    def __init__(self, module: nn.Module, context: StageContext) -> None:
        self._module, self._mesh, self._control = module, context.mesh, context.control
        self._sent: list[Snapshot] = []

    def share(self) -> None:
        """Take over the first batch shard's values; every rank calls it alike."""
        buffers = list(self._module.buffers())
        if self._mesh.data_parallel_size == 1 or not buffers:
            return
        same = len(self._sent) == len(buffers) and all(map(Snapshot.is_of, self._sent, buffers))
        if self._control.agrees(str(same)) and same:
            return
        group = self._mesh.submesh(self._mesh.data_parallel_axes).get_group()
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            _send([buffer for buffer in buffers if buffer.dtype == dtype], group)
        self._sent = list(map(Snapshot, buffers))


def _send(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    joined = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
    dist.broadcast(joined, group=group, group_src=0)
    for buffer, values in zip(buffers, joined.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.detach().copy_(values.view(buffer.shape))
