"""Shards that rank 0 makes whole one after another, while it writes a file: so that it never holds all of them.

What rank 0 wants is told to all ranks by number; who holds a part of it that rank 0 has not sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from lightning_autoparallel.apply.gather import whole_on_host
from lightning_autoparallel.apply.states import mapped_state
from lightning_autoparallel.checkpoint.together import first_rank_runs
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.torch_compat.later_tensors import LaterParameter, LaterTensor

_NOTHING_MORE = -1


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a rank's part lies in the whole."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        for dim, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


class ShardsOfRanks:
    """The shards that a checkpoint holds, in an order that all ranks share; those that are one are written once."""

    def __init__(self, group: Any) -> None:
        """``group`` is a gloo group of all ranks, or None where there is one rank."""
        self._group = group
        self._local: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._places: list[_Place | None] = []
        self._ranks: list[tuple[int, ...]] = []  # that have the tensor at all
        self._made: dict[Any, LaterTensor] = {}
        self._senders: list[dict[int, _Place]] = []

    def taken_out_of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """``checkpoint`` with whole tensors in the place of shards: they are made when they are written.

        Shards of which parts are interleaved are made whole at once.
        """
        taken: dict[str, Any] = mapped_state(self._taken, dict(checkpoint))
        return taken

    def copy(self) -> None:
        """Keep copies of this rank's parts on the host, so that training may go on."""
        self._local = [local.to("cpu", copy=True) for local in self._local]

    def written_by(self, write: Callable[[], None]) -> None:
        """Call ``write`` on rank 0, to which all ranks of the group send what it asks for.

        Raises:
            CheckpointError: on all ranks, if it raised, or if ranks have other shards.
        """
        if self._group is None:
            self._senders = [{} if place is None else {0: place} for place in self._places]
            return first_rank_runs(write)
        self._agree_on_senders()
        if dist.get_rank() != 0:
            self._serve()
        first_rank_runs(partial(self._write_and_end, write), self._group)

    def _agree_on_senders(self) -> None:
        kinds = [(tuple(shape), str(local.dtype)) for shape, local in zip(self._shapes, self._local, strict=True)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (kinds, self._places), self._group)
        if any(theirs != everyone[0][0] for theirs, _ in everyone):
            raise CheckpointError(
                "no checkpoint is saved: ranks have put other sharded tensors into it, by rank "
                f"{[len(theirs) for theirs, _ in everyone]}, or of other shapes: what callbacks and modules add must "
                "be the same on all ranks"
            )
        places = [theirs for _, theirs in everyone]
        self._senders = [self._chosen(number, places) for number in range(len(self._local))]

    def _serve(self) -> None:
        wanted = torch.empty((), dtype=torch.int64)
        while True:
            dist.broadcast(wanted, 0, self._group)
            if (number := int(wanted)) == _NOTHING_MORE:
                return
            if dist.get_rank() in self._senders[number]:
                dist.send(_bytes(self._local[number]), 0, self._group)

    def _write_and_end(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            dist.broadcast(torch.tensor(_NOTHING_MORE), 0, self._group)

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if not isinstance(leaf, nn.Parameter):
            return self._later(leaf)
        value = self._later(leaf)
        if isinstance(value, Tensor):
            return nn.Parameter(value, leaf.requires_grad)
        return LaterParameter(value, leaf.requires_grad)

    def _later(self, leaf: DTensor) -> LaterTensor | Tensor:
        if not _is_plain(leaf):
            whole: Tensor = whole_on_host(leaf)
            return whole
        # Each has a number of its own on every rank, also those that are one tensor: a rank cannot tell for others.
        made = LaterTensor(leaf.shape, leaf.dtype, partial(self._whole, len(self._local)))
        self._add(leaf)
        return self._made.setdefault(_identity(leaf), made)

    def _add(self, tensor: DTensor) -> None:
        mesh = tensor.device_mesh
        chunks = [] if mesh.get_coordinate() is None else tensor.__create_chunk_list__()
        places = [_Place(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes)) for chunk in chunks]
        self._local.append(tensor.to_local().detach())
        self._shapes.append(tensor.shape)
        self._places.append(places[0] if places and 0 not in places[0].sizes else None)
        self._ranks.append(tuple(mesh.mesh.flatten().tolist()))

    def _chosen(self, number: int, everyone: Sequence[Sequence[_Place | None]]) -> dict[int, _Place]:
        """The first of the ranks that hold the same part, for each part."""
        found: dict[_Place, int] = {}
        for rank in sorted(self._ranks[number]):
            place = everyone[rank][number]
            if place is not None:
                found.setdefault(place, rank)
        return {rank: place for place, rank in found.items()}

    def _whole(self, number: int) -> Tensor:
        senders, local = self._senders[number], self._local[number]
        if list(senders) == [0] and local.shape == self._shapes[number]:
            return local
        if self._group is not None:
            dist.broadcast(torch.tensor(number), 0, self._group)
        whole = torch.empty(self._shapes[number], dtype=local.dtype)
        for rank, place in senders.items():
            part = local if rank == 0 else self._received(rank, place, local.dtype)
            place.of(whole).copy_(part)
        return whole

    def _received(self, rank: int, place: _Place, dtype: torch.dtype) -> Tensor:
        part = torch.empty(place.sizes, dtype=dtype)
        dist.recv(_bytes(part), rank, self._group)
        return part


def _identity(tensor: DTensor) -> Any:
    """Equal for tensors that are one, as tied weights are; a rank without any part of a tensor knows nothing of it."""
    local = tensor.to_local()
    if not local.numel():
        return object()
    geometry = (local.storage_offset(), local.shape, local.stride(), local.dtype)
    return local.untyped_storage()._cdata, geometry, tensor.shape, tensor.placements, tensor.device_mesh


def _is_plain(tensor: DTensor) -> bool:
    return all(type(placement) in (Shard, Replicate) for placement in tensor.placements)


def _bytes(tensor: Tensor) -> Tensor:
    """What gloo sends whatever its dtype; of a tensor on the host it is the tensor itself."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
