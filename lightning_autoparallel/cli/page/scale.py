"""Round figures along an axis."""

from __future__ import annotations

import math


def ticks(end: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to at most ``end``, and no more than ``most`` beside the 0.

    >>> ticks(7.3, 4)
    [0.0, 2.0, 4.0, 6.0]
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end / (power * factor) <= most)
    return [i * step for i in range(math.floor(end / step + 1e-9) + 1)]
