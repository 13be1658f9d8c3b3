"""Which values of its forward a step's backward reads, for what they take of a rank while it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Names of nodes: those ``saved`` until the backward, and sets of those ``recomputed`` in it that meet there."""

    saved: Collection[str] = ()
    recomputed: Collection[Collection[str]] = ()
