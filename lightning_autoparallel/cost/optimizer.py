"""What an optimizer's update takes."""

from __future__ import annotations

from lightning_autoparallel.cost.hardware import HardwareSpec

ADAMW_MOVES = 7  # tensors of the size of the gradients


def update_time_us(size_bytes: float, hardware: HardwareSpec) -> float:
    """Microseconds of updating parameters of ``size_bytes``, by an optimizer that moves what AdamW does.

    AdamW reads a parameter, its gradient and two moments, and writes all but the gradient.
    """
    return ADAMW_MOVES * size_bytes / ((hardware.optimizer_gb_per_s or hardware.achieved_gb_per_s) * 1e3)
