"""Bytes as messages and tables show them."""

from __future__ import annotations


def format_bytes(size_bytes: int) -> str:
    """``1536`` -> ``"1.5 KiB"``; below 1 KiB the bytes themselves."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
