"""Single files on this machine's disks, written without a copy of them in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_autoparallel.checkpoint.location import Location


def write_file(whole: Mapping[str, Any], location: Location) -> None:
    """Write a file, which is there when it is whole: Lightning's own writer holds all of its bytes first.

    ``location`` is local, and no folder is there.
    """
    staging = Path(location.staging().path)
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(whole, staging)
        os.replace(staging, location.path)
    finally:
        staging.unlink(missing_ok=True)
