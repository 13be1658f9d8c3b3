"""What a Trainer is given that trains only to be measured, whatever its recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# It keeps and shows nothing, validates nothing, and ends where whoever measures ends it.
MEASURED_ALONE: Mapping[str, Any] = MappingProxyType(
    {
        "num_nodes": 1,
        "profiler": None,
        "fast_dev_run": False,
        "barebones": False,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
)
