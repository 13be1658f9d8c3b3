"""How a loss's head is computed, as the pass is told it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """``chunks``: how many chunks every head is computed in that can be; None where predictions say it."""

    chunks: int | None = None
