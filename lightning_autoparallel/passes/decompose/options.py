"""How products are decomposed, as passes are told it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecomposeOptions:
    """``when``, ``order`` and ``depth`` as ``config.DecomposeSpec`` explains and checks them.

    ``backend`` is the name of what process groups talk through.
    """

    when: str = "auto"
    order: str = "swizzle"
    depth: int = 1
    backend: str = "nccl"


# What the backends of torch are known to do: a transfer is an all-to-all of uneven pieces.
ORDERS_OF_BACKEND: dict[str, tuple[str, ...]] = {
    "nccl": ("swizzle", "cyclic", "broadcast"),
    "gloo": ("swizzle", "cyclic", "broadcast"),
}
