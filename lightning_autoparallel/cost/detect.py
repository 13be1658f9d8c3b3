"""Which entry of the table of hardware a device is, and what it holds."""

from __future__ import annotations

import os

import torch

from lightning_autoparallel.cost.hardware import HARDWARE, HardwareSpec

# Parts of the names that drivers give devices, in the order in which they are looked for.
_NAMES = (("H200", "h200"), ("H100", "h100"), ("B200", "b200"), ("A100", "a100-80gb"), ("MI300X", "mi300x"))


def detected_hardware(device_type: str, otherwise: str = "h100") -> HardwareSpec:
    """The table's entry for this process's device; ``otherwise`` for GPUs that it does not have, or without one."""
    if device_type == "cpu":
        return HARDWARE["cpu"]
    if not torch.cuda.is_available():
        return HARDWARE[otherwise]
    return HARDWARE[entry_of(torch.cuda.get_device_name(), otherwise)]


def unlisted_gpu() -> str | None:
    """The name of this process's GPU where the table has no entry for it."""
    if not torch.cuda.is_available():
        return None
    name = str(torch.cuda.get_device_name())
    return None if entry_of(name, otherwise="") else name


def entry_of(device_name: str, otherwise: str) -> str:
    """The name of the table's entry for a device of this name: ``h100`` of ``NVIDIA H100 80GB HBM3``."""
    return next((entry for part, entry in _NAMES if part in device_name), otherwise)


def memory_of(device_type: str) -> int:
    """Bytes of this process's device, all of which it may use; of the host, for a CPU."""
    if device_type == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
