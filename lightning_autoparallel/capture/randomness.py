"""Draws that no graph makes: generators are compared before and after a capture, or a run in it, and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_autoparallel.torch_compat.generators import generator_states, restore_generators


@contextlib.contextmanager
def generators_kept(drawn: list[str]) -> Iterator[None]:
    """Generators are as before on exit; ``drawn`` gets the names of those that moved."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), generator_states()
    try:
        yield
    finally:
        if random.getstate() != python:
            drawn.append("Python's random")
            random.setstate(python)
        if not _same(arrays, np.random.get_state()):
            drawn.append("numpy.random")
            np.random.set_state(arrays)
        moved = restore_generators(tensors)
        if moved is not None:
            drawn.append(f"torch's {moved} generator outside of the graph")


def _same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2:] == other[2:]
