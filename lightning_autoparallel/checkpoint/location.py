"""Where a checkpoint lies: on this machine's disks, where a write can be exchanged for what was there, or elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_autoparallel.errors import CheckpointError

TRAINER_STATE = "meta.pt"  # written last: a folder without it is no checkpoint
TENSORS = ".metadata"
_REPLACED = "replaced"  # ends the name of what is about to be replaced


class Location:
    """A path, or a URL that fsspec knows; ``options`` are those of its file system."""

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.url = os.fspath(path)
        self.file_system, self.path = url_to_fs(self.url, **self.options)

    def __str__(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        """Whether folders can be renamed at once."""
        return isinstance(self.file_system, LocalFileSystem)

    def child(self, name: str) -> Location:
        """What lies in this folder."""
        return Location(f"{self.url.rstrip('/')}/{name}", self.options)

    def exists(self) -> bool:
        """Whether anything is there."""
        return bool(self.file_system.exists(self.path))

    def is_folder(self) -> bool:
        """Whether a folder is there, with a checkpoint or not."""
        return bool(self.file_system.isdir(self.path))

    def is_file(self) -> bool:
        """Whether a file is there."""
        return bool(self.file_system.isfile(self.path))

    def is_sharded(self) -> bool:
        """Whether a complete folder of shards is there."""
        return self.child(TRAINER_STATE).is_file() and self.child(TENSORS).is_file()

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""
        if self.exists():
            self.file_system.rm(self.path, recursive=True)

    def staging(self) -> Location:
        """Where to write before ``publish``: beside it, or, where nothing can be renamed, right here."""
        return self._beside("writing") if self.is_local else self

    def prepare(self) -> None:
        """Make the staging folder, empty, while what is here stays; on one rank.

        Raises:
            CheckpointError: something else than a checkpoint is here.
        """
        self.put_back()
        if self.is_folder() and not self.is_sharded() and self.file_system.ls(self.path):
            raise CheckpointError(f"{self} is a folder, but no checkpoint: remove it or choose another name")
        staging = self.staging()
        if staging is self:
            (self if self.is_file() else self.child(TRAINER_STATE)).remove()  # from here on there is none
        else:
            staging.remove()
        staging.file_system.makedirs(staging.path, exist_ok=True)

    def publish(self) -> None:
        """Put what was written to ``staging`` in the place of what was here; on one rank."""
        staging = self.staging()
        if staging is self:
            return
        with self.replaced():
            Path(staging.path).rename(self.path)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, something is put in the place of what is here, which comes back where that fails."""
        before = self._beside(_REPLACED)
        before.remove()
        if self.exists():
            Path(self.path).rename(before.path)
        try:
            yield
        finally:
            self.put_back()
        before.remove()

    def put_back(self) -> None:
        """Where something was not replaced after all, or a rank was killed there, what was here; on one rank."""
        before = self._beside(_REPLACED)
        if self.is_local and before.exists() and not self.exists():
            Path(before.path).rename(self.path)

    def _beside(self, what: str) -> Location:
        folder, _, name = self.path.rstrip("/").rpartition("/")
        return Location(f"{folder}/.{name}.{what}", self.options)


def put_back_in(folder: str | os.PathLike[str]) -> None:
    """Put back the checkpoints in ``folder`` that a rank was about to replace when it was killed; any rank may call it.

    Who looks for the last checkpoint there (``ckpt_path="last"``) would find none.
    """
    location = Location(folder)
    if not location.is_local or not location.is_folder():
        return
    for left in Path(location.path).glob(f".*.{_REPLACED}"):
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            location.child(left.name[1 : -len(_REPLACED) - 1]).put_back()
