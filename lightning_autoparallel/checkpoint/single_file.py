"""Single files on this machine's disks: written without a copy of them in memory, read as far as they are used."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.errors import CheckpointError


def write_file(whole: Mapping[str, Any], location: Location) -> None:
    """Write a file, which is there when it is whole: Lightning's own writer holds all of its bytes first.

    ``location`` is local, and no folder is there.

    Raises:
        OSError: it could not be written; what was there stays.
        CheckpointError: ``location`` is elsewhere.
    """
    if not location.is_local:
        raise CheckpointError(f"{location} is not on this machine's disks: write a file there, and copy it")
    staging = Path(location.staging().path)
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staging.open("wb") as file:
            torch.save(whole, file)
        os.replace(staging, location.path)
    except RuntimeError as error:
        raise _of_the_system(error) from error
    finally:
        staging.unlink(missing_ok=True)


CUT_LATER = ("state_dict", "optimizer_states")  # of which a rank keeps its shards


def read_file(location: Location, weights_only: bool | None) -> dict[str, Any] | None:
    """What a file holds; the tensors of model and optimizers stay on the disk, and what is read of them is read there.

    Who keeps one of them copies it: the file may change. None where nothing can be left on the disk, or where it is
    trusted to hold any object, in which tensors would not be found.

    Args:
        weights_only: as for ``torch.load``.
    """
    if not location.is_local or weights_only is False:
        return None
    checkpoint: dict[str, Any] | None = None
    with contextlib.suppress(RuntimeError, OSError):  # of an old layout, or unreadable, as who reads it then says
        checkpoint = torch.load(location.path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(checkpoint, dict):
        return None
    rest = {key: value for key, value in checkpoint.items() if key not in CUT_LATER}
    return {**checkpoint, **copy.deepcopy(rest)}


def _of_the_system(error: BaseException) -> BaseException:
    """That the disk is full, or the like, which torch only says to have come with its own error."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, OSError):
        current = current.__cause__ or current.__context__
    return current or error
