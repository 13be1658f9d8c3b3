"""Tensors in files, each read into a tensor or a rank's shard: of it, no more is read than that takes."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.checkpoint.sharded import MODEL, opened
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.torch_compat.dcp import LoadPlanner

Part = tuple[slice, ...]


@dataclass(frozen=True)
class StoredSpec:
    """What a stored tensor is; ``dtype`` is a name where torch has none for it, or none that it computes with."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class StoredTensors(ABC):
    """Tensors in files, by the names that the module has for them.

    Attributes:
        source: where they lie.
        specs: all of them.
    """

    source: str
    specs: Mapping[str, StoredSpec]

    @abstractmethod
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read into tensors of the same shapes, or DTensors, of which each rank reads its shard; dtypes may differ."""

    def called(self, name: str) -> str:
        """What the files call what the module calls ``name``."""
        return name


def fill_parts(read: Callable[[str, Part], Tensor], targets: Mapping[str, Tensor]) -> None:
    """Fill every target by ``read(name, part)``, which gives a part of the whole tensor."""
    with torch.no_grad():
        for name, target in targets.items():
            local, part = _part_of(target)
            if local.numel():
                local.copy_(read(name, part))


def _part_of(target: Tensor) -> tuple[Tensor, Part]:
    """The memory of a tensor or of this rank's shard, and which part of the whole it holds."""
    if not isinstance(target, DTensor):
        return target.detach(), tuple(slice(0, size) for size in target.shape)
    (chunk,) = target.__create_chunk_list__()
    bounds = zip(chunk.offsets, chunk.sizes, strict=True)
    return target.to_local().detach(), tuple(slice(start, start + size) for start, size in bounds)


class FileTensors(StoredTensors):
    """The model in a checkpoint file; what is not read stays on the disk.

    Raises:
        CheckpointError: it cannot be read without running what it holds, or holds no ``state_dict``.
    """

    def __init__(self, file: str, prefix: str = "", weights_only: bool | None = None) -> None:
        self.source = file
        try:
            self.checkpoint: dict[str, Any] = torch.load(
                file, map_location="cpu", mmap=True, weights_only=weights_only is not False
            )
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{file} cannot be read as a checkpoint: {error}") from error
        if "state_dict" not in self.checkpoint:
            raise CheckpointError(f"{file} holds no state_dict: it is no checkpoint of a LightningModule")
        state = self.checkpoint["state_dict"]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self._tensors = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        self.specs = {name: StoredSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """As ``StoredTensors.fill``."""
        fill_parts(lambda name, part: self._tensors[name][part], targets)


class FolderTensors(StoredTensors):
    """The model in a folder of shards.

    Raises:
        CheckpointError: there is no complete sharded checkpoint, or it is not to be trusted.
    """

    def __init__(self, location: Location, prefix: str = "", weights_only: bool | None = None) -> None:
        self.source = str(location)
        self._reader, metadata, self.checkpoint = opened(location, weights_only)
        self._prefix, self._weights_only = prefix, weights_only
        stored = {
            ".".join(map(str, path[1:])): metadata.state_dict_metadata[flat]
            for flat, path in (metadata.planner_data or {}).items()
            if path[0] == MODEL
        }
        self.specs = {
            name.removeprefix(prefix): StoredSpec(tuple(found.size), found.properties.dtype)
            for name, found in stored.items()
            if isinstance(found, TensorStorageMetadata) and name.startswith(prefix)
        }

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """As ``StoredTensors.fill``."""
        state = {MODEL: {f"{self._prefix}{name}": target.detach() for name, target in targets.items()}}
        # each rank reads its own shards: there is nothing to agree on
        dcp.load(state, storage_reader=self._reader, planner=LoadPlanner(self._weights_only), no_dist=True)


def own_checkpoint(
    path: str | os.PathLike[str], prefix: str = "", weights_only: bool | None = None
) -> FileTensors | FolderTensors:
    """The model in a checkpoint of ours or of Lightning: a file on this machine's disks, or a folder of shards.

    Raises:
        CheckpointError: there is none.
    """
    location = Location(path)
    if location.is_folder():
        return FolderTensors(location, prefix, weights_only)
    if not location.is_local or not location.is_file():
        raise CheckpointError(f"{location} is no file of this machine and no folder: give a checkpoint, or safetensors")
    return FileTensors(location.path, prefix, weights_only)
