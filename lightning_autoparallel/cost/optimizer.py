"""What an optimizer keeps of a parameter, and what its update takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_autoparallel.cost.hardware import HardwareSpec

ADAMW_STATE = 2.0  # bytes of AdamW's moments for each byte of a parameter
ADAMW_MOVES = 7  # tensors of the size of the gradients


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes that optimizers keep for each byte of a parameter, by its name; AdamW's where ``per_byte`` is None.

    They step once in ``micro_batches``, whose gradients add up.
    """

    per_byte: Mapping[str, float] | None = None
    micro_batches: int = 1

    def of(self, name: str) -> float:
        """0 for what no optimizer has."""
        return ADAMW_STATE if self.per_byte is None else self.per_byte.get(name, 0.0)


ADAMW = OptimizerState()


def update_time_us(size_bytes: float, hardware: HardwareSpec, state_per_byte: float = ADAMW_STATE) -> float:
    """Microseconds of updating parameters of ``size_bytes``, whose optimizer keeps so much for each of these bytes.

    It reads a parameter, its gradient and what is kept (AdamW: two moments), and writes all but the gradient.
    """
    moved_bytes = (3 + 2 * state_per_byte) * size_bytes
    return moved_bytes / ((hardware.optimizer_gb_per_s or hardware.achieved_gb_per_s) * 1e3)
