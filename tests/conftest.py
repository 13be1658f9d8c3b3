"""Every test runs as if it were alone: one that leaves process-wide state behind fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._hermetic import no_leaks


@pytest.fixture(autouse=True)
def hermetic() -> Iterator[None]:
    """Fail the test if it leaves behind what `tests/_hermetic.py` lists."""
    with no_leaks():
        yield
