"""Every test runs as if it were alone: one that leaves process-wide state behind fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._hermetic import no_leaks
from tests.worlds import Worlds


@pytest.fixture(autouse=True)
def hermetic() -> Iterator[None]:
    """Fail the test if it leaves behind what `tests/_hermetic.py` lists."""
    with no_leaks():
        yield


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Gloo worlds by size, each started at its first use and shared by all tests."""
    started = Worlds()
    yield started
    started.stop()
