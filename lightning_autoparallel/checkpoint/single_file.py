"""Single files on this machine's disks, written and read without a copy of them in memory."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.torch_compat.tree import tree_map

CUT = frozenset({"state_dict", "optimizer_states"})  # of which every rank copies its part


def write_file(whole: Mapping[str, Any], location: Location) -> None:
    """Write a file, which is there when it is whole: Lightning's own writer holds all of its bytes first.

    ``location`` is local, and no folder is there.

    Raises:
        OSError: it could not be written; what was there stays.
    """
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


def can_be_mapped(location: Location) -> bool:
    """Whether it is a file that ``read_file`` reads: torch wrote others before 1.6, and still does on request."""
    return location.is_local and zipfile.is_zipfile(location.path)


def read_file(location: Location, weights_only: bool | None) -> dict[str, Any]:
    """Read a file of which the model and the optimizers stay on the disk until somebody reads their tensors.

    The ranks of a host then share one copy of it, which the system may drop; Lightning's own reader has one for each.
    What else is in the file is copied, because callbacks may keep it for longer than the file is there.
    """
    checkpoint = torch.load(location.path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(checkpoint, dict):
        return checkpoint
    return {key: value if key in CUT else tree_map(_copy, value) for key, value in checkpoint.items()}


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _of_the_system(error: BaseException) -> BaseException:
    """That the disk is full, or the like, which torch only says to have come with its own error."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, OSError):
        current = current.__cause__ or current.__context__
    return current or error
