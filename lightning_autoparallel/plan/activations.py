"""Which values of its forward a step's backward reads, for what they take of a rank while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Names of nodes: those ``saved`` until the backward, and of those ``recomputed`` in it each set that meets there.

    Those of a set have an order, that of their calls: by another one the solver may find another plan as good.
    """

    saved: Collection[str] = ()
    recomputed: Sequence[Sequence[str]] = ()
