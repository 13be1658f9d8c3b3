"""The strategy's checkpoints: a folder of shards, or one file as one device has it; both are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_autoparallel.checkpoint import (
    RANDOM_STATE,
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    load_sharded_checkpoint,
    model_state,
    optimizer_state,
    save_sharded_checkpoint,
)
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import CheckpointError, ConfigError
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.strategy.world import WorldStrategy


class SavingStrategy(WorldStrategy):
    """Saves what the engine's module and the optimizers hold; ``_loaded_file`` says what was loaded last."""

    def __init__(
        self, spec: MeshSpec, process_group_backend: str | None, timeout: timedelta, save_distributed_checkpoint: bool
    ) -> None:
        super().__init__(spec, process_group_backend, timeout)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._engine: StepEngine | None = None
        self._loaded_file = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards are loaded into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """``load_checkpoint`` restores optimizers from a folder; a file goes Lightning's way."""
        return self._loaded_file

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the model, or for a single file the whole model on rank 0."""
        assert self.lightning_module is not None
        if self.save_distributed_checkpoint:
            return model_state(self.lightning_module)
        return full_model_state(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shards of an optimizer's state, or for a single file the whole state on rank 0."""
        assert self.lightning_module is not None
        if self.save_distributed_checkpoint:
            return optimizer_state(self.lightning_module, optimizer)
        return full_optimizer_state(optimizer, keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder with every rank's shards, or one file from rank 0."""
        assert self._engine is not None
        path = Path(self.broadcast(filepath))
        if not self.save_distributed_checkpoint:
            self._save_file(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise ConfigError(
                "storage_options are not supported: sharded checkpoints are written by torch, not by Lightning; "
                "set save_distributed_checkpoint=False for a single file"
            )
        save_sharded_checkpoint(checkpoint, path, random_state=self._engine.random_state, is_first=self.is_global_zero)

    def _save_file(self, checkpoint: dict[str, Any], path: Path, storage_options: Any) -> None:
        if self.broadcast(path.is_dir()):  # as rank 0 sees it, for all ranks to stop or go on
            raise CheckpointError(f"{path} is a folder, not a file: remove it or choose another name")
        if self.is_global_zero:
            assert self._engine is not None
            whole = {**checkpoint, RANDOM_STATE: self._engine.random_state}
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards into the sharded model and its optimizers, or read a single file for Lightning."""
        assert self.lightning_module is not None
        path = self.broadcast(checkpoint_path)
        self._loaded_file = not Path(path).is_dir()
        if self._loaded_file:
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            random_state = checkpoint.pop(RANDOM_STATE, {})
        else:
            checkpoint, random_state = load_sharded_checkpoint(
                Path(path),
                self.lightning_module,
                self.optimizers,
                strict=self.lightning_module.strict_loading,
                weights_only=weights_only,
            )
        if self._engine is not None:
            self._engine.random_state = random_state
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Cut the model of a single file into shards; ``load_checkpoint`` has loaded that of a folder."""
        if self._loaded_file:
            assert self.lightning_module is not None
            load_full_model_state(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cut the optimizers' states of a single file into shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_full_optimizer_state(optimizer, state)
