"""Cyclic garbage, of which planning makes little beside what stays to its end."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_MORE = 70  # times as many new objects between collections of the youngest: about fifty thousand, some megabytes


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect less often inside, and never look at what is there already, as each full collection else would."""
    first, *others = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(first * _MORE, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
        gc.unfreeze()
