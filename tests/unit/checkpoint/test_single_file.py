"""Files are written on this machine's disks, and nowhere else without a word."""

from __future__ import annotations

import pytest

from lightning_autoparallel.checkpoint import Location, write_file
from lightning_autoparallel.errors import CheckpointError


def test_a_file_elsewhere_is_refused() -> None:
    there = Location("memory://bucket/whole.ckpt")
    with pytest.raises(CheckpointError, match="is not on this machine's disks"):
        write_file({}, there)
    assert not there.exists()
