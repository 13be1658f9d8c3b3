"""Which parameters of a test are in the default tier: the others run with ``-m matrix``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], in_default: Callable[[Any], bool]) -> list[Any]:
    """``values`` as parameters; tuples are several arguments."""
    return [
        pytest.param(
            *(value if type(value) is tuple else (value,)), marks=() if in_default(value) else pytest.mark.matrix
        )
        for value in values
    ]
