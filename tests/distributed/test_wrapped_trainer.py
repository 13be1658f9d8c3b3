"""Tools that wrap methods of the Trainer, or call them out of turn: checkpoints are found and read all the same."""

from __future__ import annotations

import tempfile
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_autoparallel.lightning_compat import restore_modules_and_callbacks, weights_only_of_run
from tests.distributed.jobs import make_strategy, make_trainer
from tests.support.worlds import Worlds


class Begun(Callback):
    """Notes where training begins."""

    step = -1

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = trainer.global_step


def wrapped(method: Any) -> Any:
    """As tools wrap methods that they want to hear of."""

    @wraps(method)
    def call(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return call


def begun() -> list[int]:
    """Where two trainings begin, the second of which goes on from the first's checkpoint."""
    steps = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Trainer, "_run", wrapped(Trainer._run)):
        path = str(Path(folder) / "first.ckpt")
        for epochs, given in ((1, None), (2, path)):
            callback = Begun()
            strategy = make_strategy({"dp_shard": 1}, {})
            options = {"limit_train_batches": 2, "limit_val_batches": 0, "callbacks": [callback]}
            trainer = make_trainer(strategy, 1, max_epochs=epochs, **options)
            trainer.fit(BoringModel(), ckpt_path=given)
            trainer.save_checkpoint(path)
            steps.append(callback.step)
    return steps


def read_before_a_run() -> tuple[int, list[str]]:
    """What a Trainer that has no module yet reads of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "first.ckpt")
        options = {"limit_train_batches": 2, "limit_val_batches": 0}
        trainer = make_trainer(make_strategy({"dp_shard": 1}, {}), 1, **options)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(path)
        found = make_trainer(make_strategy({"dp_shard": 1}, {}), 1).strategy.load_checkpoint(path, weights_only=True)
    return found["global_step"], list(found["state_dict"])


def test_a_file_is_read_before_there_is_a_module(worlds: Worlds):
    assert worlds(1).run(read_before_a_run) == [(2, ["layer.weight", "layer.bias"])]


def test_a_checkpoint_is_resumed_whoever_wraps_the_run(worlds: Worlds):
    (steps,) = worlds(1).run(begun)
    assert steps == [0, 2]


def test_outside_of_a_run_nothing_was_given():
    assert weights_only_of_run() is None
    with pytest.raises(AssertionError, match="and by nothing else"):
        restore_modules_and_callbacks(mock.Mock())
