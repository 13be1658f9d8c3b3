"""What autograd holds on to while a backward runs."""

from __future__ import annotations

from typing import Any


def release_saved_tensors(ctx: Any) -> None:
    """Let go of what a custom function saved, before its backward returns; not under ``retain_graph=True``.

    Undocumented, but what AOTAutograd does: otherwise every saved tensor lives until the whole backward is done.
    """
    ctx.maybe_clear_saved_tensors()
