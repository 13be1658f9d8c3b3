"""Rates by which even small tensors are worth sharing out: nothing has a latency, and memory is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLOW_MEMORY: Mapping[str, Any] = {
    "base": "h100",
    "memory_gb_per_s": 100.0,
    "kernel_latency_us": 0.0,
    "launch_latency_us": 0.0,
    "intra_node": {"latency_us": 0.0},
}
