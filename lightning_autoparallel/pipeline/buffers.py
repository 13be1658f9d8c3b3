"""Buffers that something else than a common step changes: ranks start from the same ones, or say that they cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.fx.values import Snapshot, digest
from lightning_autoparallel.pipeline.stages import StageContext


class AgreedBuffers:
    """What the ranks' common steps take for equal: buffers as of when ranks last had the same, and knew it.

    What such a step writes into them is equal by itself. Of buffers that it writes the version tells whether something
    else has changed them since, of others what ``Snapshot`` looks at; only those that have changed are read.
    """

    def __init__(self) -> None:
        self._known: dict[str, Snapshot] = {}
        self._compared: dict[str, Snapshot] = {}

    def are(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """All ranks have these, with the same values."""
        self._known = {name: Snapshot(buffer) for name, buffer in buffers}

    def changes(self, buffers: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, str]:
        """Digests of those among ``names`` that something else than a common step has changed, for ranks to compare.

        Sparse tensors are not looked into.
        """
        known = self._known
        changed = [name for name in names if name not in known or not known[name].is_of(buffers[name])]
        self._compared = {name: Snapshot(buffers[name]) for name in changed if _has_values(buffers[name])}
        return {name: digest(buffers[name]) for name in self._compared}

    def agree(self) -> None:
        """Ranks found the same changes."""
        self._known |= self._compared
        self._compared = {}

    def write(self, buffers: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """A common step has written those of ``names``."""
        for name in names:
            if name in self._known:
                self._known[name].follow(buffers[name])
            else:
                self._known[name] = Snapshot(buffers[name])


class SharedBuffers:
    """The buffers of one module, sent to all batch shards when some rank's have changed: one launch for each dtype.

    DDP sends them before each training step. Here writes that torch does not count (``buffer.data``) are seen on the
    host only, in buffers of up to 1 MiB: ``Snapshot`` says why.
    """

    def __init__(self, module: nn.Module, context: StageContext) -> None:
        self._module, self._mesh, self._control = module, context.mesh, context.control
        self._sent: list[Snapshot] = []

    def share(self) -> None:
        """Take over the first batch shard's values; every rank calls it alike."""
        buffers = [buffer for buffer in self._module.buffers() if _has_values(buffer)]
        if self._mesh.data_parallel_size == 1 or not buffers:
            return
        same = len(self._sent) == len(buffers) and all(map(Snapshot.is_of, self._sent, buffers))
        if self._control.agrees(str(same)) and same:
            return
        group = self._mesh.submesh(self._mesh.data_parallel_axes).get_group()
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            _send([buffer for buffer in buffers if buffer.dtype == dtype], group)
        self._sent = list(map(Snapshot, buffers))

    def make_equal(self) -> None:
        """Give all ranks rank 0's values, which checkpoints have, too."""
        if self._control.alone:
            return
        buffers = [buffer for buffer in self._module.buffers() if _has_values(buffer) and buffer.numel()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            _send([buffer for buffer in buffers if buffer.dtype == dtype], None)


def _has_values(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not isinstance(buffer, DTensor)


def _send(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    values_of = [_once(buffer.detach()) for buffer in buffers]
    joined = torch.cat([values.reshape(-1) for values in values_of])
    dist.broadcast(joined.view(torch.uint8), group=group, group_src=0)  # gloo does not know every dtype
    for values, sent in zip(values_of, joined.split([values.numel() for values in values_of]), strict=True):
        values.copy_(sent.view(values.shape))


def _once(buffer: Tensor) -> Tensor:
    """A buffer's values without those that ``expand`` shows again, which nothing can be copied over."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        buffer = buffer.narrow(dim, 0, 1) if size > 1 and not stride else buffer
    return buffer
