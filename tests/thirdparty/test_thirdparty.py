"""Models of other libraries train to one device's weights, or, where their Python runs at every step, to DDP's.

`tests/conftest.py` prints the table of all rows at the end.
"""

from __future__ import annotations

import pytest

from tests.thirdparty.compare import LIMIT_S, run_case
from tests.thirdparty.registry import builders

SIDES = 2  # ours and one oracle


@pytest.mark.thirdparty
@pytest.mark.timeout(SIDES * LIMIT_S + 60)
@pytest.mark.parametrize("name", builders())
@pytest.mark.parametrize("side", ["ours", "tp"])
def test_trains_like_its_oracle(name: str, side: str, record_property):
    """On two ranks, or on two axes of two."""
    row = run_case(name, side=side)
    record_property("thirdparty", str(row))
    assert row.passed, f"{row}\n{row.trace}"
