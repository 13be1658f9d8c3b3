"""The only table of devices and links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """Rates that costs are computed from. They rank placements; no prediction of seconds is shown from them yet."""

    name: str
    matmul_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    link_latency_us: float
    kernel_latency_us: float


# Orders of magnitude of an accelerator with a fast link, chosen so that their *ratios* are typical: moving a byte
# between ranks costs some ten times reading it, and a launch costs as much as moving about a megabyte.
GENERIC = HardwareSpec(
    name="generic",
    matmul_tflops=300.0,
    memory_gb_per_s=2000.0,
    link_gb_per_s=100.0,
    link_latency_us=10.0,
    kernel_latency_us=2.0,
)
