"""``torch.distributed.checkpoint`` on any file system, without unpickling what a stranger may have written."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

KeyPath = Sequence[str | int]  # through dicts and lists

_METADATA = "torch.distributed.checkpoint.metadata"
# what a `.metadata` file names, beside the classes of that module and dtypes
_NAMED = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "SerializationFormat"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_own = module == _METADATA and "." not in name  # a dotted name would lead into what that module imports
        if is_dtype or is_own or (module, name) in _NAMED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # with it early Pythons 3.11 name a member of an enum
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's .metadata")


def _member(kind: Any, name: Any) -> enum.Enum:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name!r} of {kind!r} does not belong into a checkpoint's .metadata")
    return kind.__members__[name]


class _SafeMetadata(FileSystemReader):
    """Reads ``.metadata`` without running what it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(stream).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafeFsspecReader(_SafeMetadata, FsspecReader):
    pass


class LoadPlanner(DefaultLoadPlanner):
    """Loads what the checkpoint has of what is asked for; ``weights_only`` is that of ``torch.load``."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(allow_partial_load=True)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value that is no tensor."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=self._weights_only))


class MadeWhenWritten(DefaultSavePlanner):
    """Saves tensors on meta as what ``make`` gives for their names, one after another."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written for one item."""
        is_absent = isinstance(object, torch.Tensor) and object.is_meta
        return self._make(write_item.index.fqn) if is_absent else super().transform_object(write_item, object)


def reader_of(path: str, options: Mapping[str, Any], weights_only: bool | None) -> FileSystemReader:
    """Reads a folder of shards; a path with a protocol (``s3://``) through fsspec with its ``options``."""
    trusted = weights_only is False
    if "://" in path:
        return (FsspecReader if trusted else _SafeFsspecReader)(path, **options)
    return (FileSystemReader if trusted else _SafeMetadata)(path)


def writer_to(path: str, options: Mapping[str, Any]) -> FileSystemWriter:
    """Writes a folder of shards; as ``reader_of``."""
    return FsspecWriter(path, **options) if "://" in path else FileSystemWriter(path)


def put(state: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at ``path``, through dicts and, where it has numbers, lists, which are made as needed."""
    set_element(state, tuple(path), value)
