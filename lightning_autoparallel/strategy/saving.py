"""The strategy's checkpoints: a folder of shards, or one file as one device has it; both are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_autoparallel.apply import gathered
from lightning_autoparallel.checkpoint import (
    FILE_LIMIT_BYTES,
    FOUND_PLAN,
    RANDOM_STATE,
    BackgroundWriter,
    Location,
    ShardsOfRanks,
    copied,
    copied_but,
    first_rank_runs,
    folder_of,
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    load_sharded_model,
    load_sharded_optimizers,
    model_state,
    on_host,
    optimizer_state,
    read_file,
    read_sharded_model,
    save_folder,
    state_bytes,
    write_file,
)
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import CheckpointError, ConfigError
from lightning_autoparallel.lightning_compat import (
    TorchCheckpointIO,
    Trainer,
    gets_checkpoints,
    is_saved_by_trainer,
    rank_zero_info,
    rank_zero_warn,
    restore_modules_and_callbacks,
    weights_only_of_run,
)
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.strategy.starting import shard_what_hooks_made
from lightning_autoparallel.strategy.world import WorldStrategy

AsFolder = bool | Literal["auto"]


class SavingStrategy(WorldStrategy):
    """Saves what the engine's module and the optimizers hold; ``_folder`` is what was loaded last, if it was one."""

    def __init__(
        self,
        spec: MeshSpec,
        process_group_backend: str | None,
        timeout: timedelta,
        save_distributed_checkpoint: AsFolder,
        async_save: bool,
    ) -> None:
        super().__init__(spec, process_group_backend, timeout)
        if save_distributed_checkpoint not in (True, False, "auto"):
            raise ConfigError(
                f"save_distributed_checkpoint={save_distributed_checkpoint!r}: True writes folders, False single "
                'files, and "auto" files as long as they are small'
            )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._engine: StepEngine | None = None
        self._failed = self._restored = False
        self._folder: Location | None = None
        self._weights_only: bool | None = None
        self._on_disk = False  # tensors of the file that was read last
        self._writer = BackgroundWriter(timeout) if async_save else None
        self._as_folder: bool | None = None  # what the last checkpoint was
        self._made: list[Tensor] = []  # for the next file, by gathering
        self._stays_in_shards = False  # what goes into the next file

    def __getstate__(self) -> dict[str, Any]:
        """As that of ``WorldStrategy``."""
        return {**super().__getstate__(), "_engine": None, "_made": []}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards are loaded into shards; within ``setup``, after which Lightning need not."""
        return not self._restored

    def setup_environment(self) -> None:
        """Start the processes; nothing is restored yet."""
        self._restored = False
        super().setup_environment()

    def restore(self, trainer: Trainer) -> None:
        """Load what is to be resumed, as on one device before ``configure_optimizers``.

        Optimizers may keep the weights that they are given, and their groups may follow what hooks restore.
        """
        restore_modules_and_callbacks(trainer)
        self._restored = True

    # -- saving ------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the model, or for a single file at which somebody looks the whole model."""
        assert self.lightning_module is not None
        self._come_together()
        if self._choose_kind():
            return model_state(self.lightning_module)
        self._stays_in_shards = self._nobody_looks()
        if self._stays_in_shards:
            return on_host(self.lightning_module.state_dict())
        self._made.clear()
        return full_model_state(self.lightning_module, made=self._made_here)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shards of an optimizer's state, or for a single file at which somebody looks the whole state."""
        assert self.lightning_module is not None
        if self._choose_kind() if self._as_folder is None else self._as_folder:
            return optimizer_state(self.lightning_module, optimizer)
        if self._stays_in_shards and is_saved_by_trainer():
            return on_host(optimizer.state_dict())
        return full_optimizer_state(optimizer, made=self._made_here)

    def _nobody_looks(self) -> bool:
        """Whether on no rank anybody sees a file's tensors before ``save_checkpoint``, which gathers them singly.

        Who does finds on every rank what every rank of DDP has: hooks change the checkpoint, and run on all ranks.
        """
        assert self.lightning_module is not None
        looks = not is_saved_by_trainer() or gets_checkpoints(self.lightning_module, "on_save_checkpoint")
        return not (looks if self._control is None else any(self._control.any([looks])))

    @property
    def _made_here(self) -> list[Tensor] | None:
        """Where to note tensors that need no copy, if there are any copies."""
        return None if self._writer is None or not self.is_global_zero else self._made

    def _come_together(self) -> None:
        """Make sure that all ranks save: what is gathered from ranks that do something else would be anything.

        Raises:
            CheckpointError: some do not, such as those without the error for which a callback saves.
        """
        if self._control is None:
            return
        assert self.lightning_module is not None
        place, trainer = "saves a checkpoint", self.lightning_module.trainer
        together: bool | None
        try:
            if not trainer.interrupted:
                together = self._control.meet(place, f"rank {self.global_rank} {place}, and waits for all others to")
            elif (together := self._control.meet_soon(place)) is False:
                self._control.gather(place)  # for the others to read
        except RuntimeError as error:  # the others have ended
            raise CheckpointError("no checkpoint is saved: the other ranks have stopped") from error
        if together:
            return
        raise CheckpointError(
            f"no checkpoint is saved: rank {self.global_rank} saves, and other ranks do something else: parameters "
            "lie in shards, so that every rank must save (not only where is_global_zero is True, or one has an error)"
        )

    def _choose_kind(self) -> bool:
        """Whether the next checkpoint is a folder; the same on all ranks, which have the same tensors."""
        assert self.lightning_module is not None
        before, chosen = self._as_folder, self.save_distributed_checkpoint
        if isinstance(chosen, bool):
            self._as_folder = chosen
            return chosen
        size = state_bytes(self.lightning_module, self.optimizers)
        self._as_folder = size > FILE_LIMIT_BYTES
        if self._as_folder != before:
            kind = "folders of every rank's shards" if self._as_folder else "single files, as one device writes them"
            rank_zero_info(
                f"autoparallel: checkpoints are {kind}: the whole state has {size / 1e9:.3g} GB, and files are written "
                f"up to {FILE_LIMIT_BYTES / 1e9:g} GB (save_distributed_checkpoint says otherwise)"
            )
        return self._as_folder

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder with every rank's shards, or one file from rank 0; with ``async_save`` on a thread.

        Raises:
            CheckpointError: this or the write before it has failed, on all ranks.
        """
        self.wait_for_checkpoint()
        path = self.broadcast(str(filepath))
        random_state = {} if self._engine is None else self._engine.draws.state
        found = None if self._engine is None else self._engine.context.found.for_checkpoints
        if found is not None and "optimizer_states" in checkpoint:
            checkpoint = {**checkpoint, FOUND_PLAN: found}
        group = None if self._writer is None else self._writer.group
        made, self._made = self._made, []
        keep: Callable[[dict[str, Any]], dict[str, Any]] = dict if self._writer is None else copied
        write: Callable[[], None]
        if self._as_folder:
            tensors, beside = folder_of(checkpoint, random_state)
            write = partial(save_folder, keep(tensors), keep(beside), Location(path, storage_options), group)
        elif type(self.checkpoint_io) is TorchCheckpointIO and Location(path).is_local and storage_options is None:
            whole, shards = self._in_parts({**checkpoint, RANDOM_STATE: random_state}, made)
            write = partial(shards.written_by, partial(self._write_file, whole, path, None))
        else:  # callbacks may have put shards of their own there
            whole = {**gathered(checkpoint, keep=self.is_global_zero), RANDOM_STATE: random_state}
            whole = whole if self._writer is None or not self.is_global_zero else copied_but(made, whole)
            write = partial(first_rank_runs, partial(self._write_file, whole, path, storage_options), group)
        write() if self._writer is None else self._writer.submit(write)

    def _in_parts(self, checkpoint: dict[str, Any], made: list[Tensor]) -> tuple[dict[str, Any], ShardsOfRanks]:
        """What a file shall hold, and the shards that are made whole while it is written."""
        on_main_thread = None if self._control is None else self._control.group
        shards = ShardsOfRanks(on_main_thread if self._writer is None else self._writer.group)
        whole = shards.taken_out_of(checkpoint)
        whole = whole if self.is_global_zero else {}  # who writes
        if self._writer is None:
            return whole, shards
        shards.copy()
        return copied_but(made, whole), shards

    def _write_file(self, whole: dict[str, Any], path: str, storage_options: Any) -> None:
        location = Location(path)
        was_larger = location.is_sharded()
        if location.is_folder() and not was_larger:
            raise CheckpointError(f"{path} is a folder, not a file: remove it or choose another name")
        if was_larger and not location.is_local:
            location.remove()
        with location.replaced() if was_larger and location.is_local else contextlib.nullcontext():
            if type(self.checkpoint_io) is TorchCheckpointIO and location.is_local and storage_options is None:
                write_file(whole, location)
            else:
                self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or folder, once what is to take its place is written."""
        if not self.is_global_zero:
            return
        if self._writer is None:
            super().remove_checkpoint(filepath)
        else:
            self._writer.after_last(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    def wait_for_checkpoint(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: what was being written could not be.
        """
        if self._writer is not None:
            self._writer.wait()

    def on_exception(self, exception: BaseException) -> None:
        """Remember that training ends with an error, which another one must not hide."""
        self._failed = True
        super().on_exception(exception)

    def end_saving(self) -> None:
        """Wait for the last checkpoint; where training has failed, its error is the one to be raised."""
        self._made.clear()
        try:
            self.wait_for_checkpoint()
        except Exception as error:
            if not self._failed:
                raise
            rank_zero_warn(f"autoparallel: the last checkpoint could not be written: {error}")

    # -- loading -----------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder of shards as the sharded model lies, or a single file, for Lightning."""
        self.wait_for_checkpoint()
        weights_only = weights_only_of_run() if weights_only is None else weights_only
        path = self.broadcast(str(checkpoint_path))
        location = None if path.startswith("http") else Location(path)
        if location is not None:
            first_rank_runs(location.put_back)
        self._folder = location if location is not None and location.is_folder() else None
        self._weights_only = weights_only
        if self._folder is None:
            checkpoint = self._read(path, location, weights_only)
            random_state = checkpoint.pop(RANDOM_STATE, {})
        else:
            module = self.lightning_module
            assert module is not None
            changes = gets_checkpoints(module, "on_load_checkpoint")
            strict = module.strict_loading
            checkpoint, random_state = read_sharded_model(self._folder, module, strict, weights_only, apart=changes)
        found = checkpoint.pop(FOUND_PLAN, None)
        if self._engine is not None:
            self._engine.draws.state = random_state
            self._engine.context.found.from_checkpoint = found
        return checkpoint

    def _read(self, path: str, location: Location | None, weights_only: bool | None) -> dict[str, Any]:
        """A single file; of its model and optimizers each rank reads later what it keeps, where no hook keeps more."""
        module = self.lightning_module
        on_disk = None
        if type(self.checkpoint_io) is TorchCheckpointIO and location is not None and module is not None:
            kept = gets_checkpoints(module, "on_load_checkpoint")
            on_disk = None if kept else read_file(location, weights_only)
        self._on_disk = on_disk is not None
        if on_disk is not None:
            return on_disk
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Cut the model of a single file into shards; that of a folder has been read as it lies."""
        assert self.lightning_module is not None
        if self._folder is not None:
            load_sharded_model(self.lightning_module, checkpoint["state_dict"], strict)
        else:
            if not self._restored and self._engine is not None and self._control is not None:
                shard_what_hooks_made(self._engine, self._control, self.precision_plugin.convert_module)
            load_full_model_state(self.lightning_module, checkpoint["state_dict"], strict, self._on_disk)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cut the optimizers' states of a single file into shards, or load those of a folder."""
        if self._folder is not None:
            assert self.lightning_module is not None
            return load_sharded_optimizers(self._folder, self.lightning_module, self.optimizers, self._weights_only)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_full_optimizer_state(optimizer, state, self._on_disk)
