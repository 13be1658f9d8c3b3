"""``RehearsalStrategy``: rank 0 of a job trains by itself, with its real shards, kernels, optimizer and data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_autoparallel.cost.detect import detected_hardware
from lightning_autoparallel.strategy.one_rank import OneRankStrategy


class RehearsalStrategy(OneRankStrategy):
    """Trains as rank 0 of a fake world: what it allocates and computes is real, but not what others would send.

    Gathers give this rank's own part again and again, reductions its own values: nothing that is computed means
    anything. Times are predicted for the device that it runs on unless ``hardware`` says otherwise, which passes go by.
    """

    strategy_name = "autoparallel_rehearsal"
    rehearses = True

    def setup_environment(self) -> None:
        """Make the fake world, for this device's rates unless others are given."""
        if self.config.hardware is None:
            self.predict_for(detected_hardware(self.root_device.type).name)
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Nothing is written: it would mean nothing."""

    @property
    def constants(self) -> list[Tensor]:
        """Those of steps that were captured."""
        return [] if self._engine is None else self._engine.constants
