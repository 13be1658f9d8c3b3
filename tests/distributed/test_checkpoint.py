"""Saving, resuming and what cannot be resumed from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_autoparallel.errors import AutoParallelError
from tests.distributed.jobs import MESH, Losses, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.worlds import Worlds

HALF, ALL = 10, 20
FOLDERS = {"plan": "fsdp", "save_distributed_checkpoint": True}


class Resumable(Net):
    """AdamW, a learning rate that changes, and masks that are drawn."""

    steps = HALF

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))
        self.register_buffer("seen", torch.zeros(()))

    def batches(self):
        """One batch again and again: which one Lightning resumes with is not the question here."""
        return super().batches()[:1] * self.steps

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(steps: int, save_to: str | None, resume_from: str | None, width: int = 10) -> dict[str, Any]:
    """Train to step `steps`, from a checkpoint or from the start."""
    torch.manual_seed(0 if resume_from is None else 5)  # the masks follow from the first run's seed
    module = Resumable(width)
    if resume_from is not None:
        torch.nn.init.zeros_(module.net[0].weight)  # what is not restored will show
    strategy, losses = make_strategy(MESH, FOLDERS), Losses()
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, 2, max_steps=steps, max_epochs=-1, callbacks=[losses])
        trainer.fit(module, ckpt_path=resume_from, weights_only=False)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    (scheduler,) = trainer.lr_scheduler_configs
    return {
        "losses": losses.values,
        "state": {name: full(tensor) for name, tensor in state.items()},
        "global_step": trainer.global_step,
        "lr": scheduler.scheduler.get_last_lr(),
    }


def error_of(*args: Any) -> str:
    """What `fit` tells the user."""
    try:
        fit(*args)
    except AutoParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_resuming_equals_never_stopping(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "half.ckpt")
    whole = worlds(2).run(fit, ALL, None, None)
    first = worlds(2).run(fit, HALF, folder, None)
    second = worlds(2).run(fit, ALL, None, folder)
    names = {path.name for path in Path(folder).iterdir()}
    assert {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"} <= names
    for rank in range(2):
        assert first[rank]["global_step"] == HALF
        assert second[rank]["global_step"] == ALL
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert second[rank]["lr"] == whole[rank]["lr"] != first[rank]["lr"]
        torch.testing.assert_close(second[rank]["state"], whole[rank]["state"], rtol=0, atol=0)


def test_what_is_no_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder"
    torch.save({}, file)
    folder.mkdir()
    for text in worlds(2).run(error_of, ALL, None, str(folder)):
        assert text.startswith(f"CheckpointError: {folder} is no checkpoint: expected a file, or a folder with meta.pt")
    (folder / "something").touch()
    for text in worlds(2).run(error_of, 1, str(folder), None):
        said = text.replace("rank 0 has failed: ", "")  # which the others are told
        assert said == f"CheckpointError: {folder} is a folder, but no checkpoint: remove it or choose another name"
    assert worlds(2).run(error_of, 1, str(file), None) == ["no error"] * 2
    assert file.is_dir()  # as a file takes the place of a file


def test_another_model(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "narrow.ckpt")
    worlds(2).run(fit, 1, folder, None)
    for text in worlds(2).run(error_of, ALL, None, folder, 12):
        assert text.startswith(f"CheckpointError: {folder} does not fit the model")


def fit_with_callback(folder: str) -> tuple[str, list[str], int]:
    """Train with ModelCheckpoint; the last path, what is in the folder, and the step of a run resumed from it."""
    module, strategy = Resumable(), make_strategy(MESH, FOLDERS)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1, save_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, 2, max_steps=9, max_epochs=-1, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(module)
        strategy.barrier()
        written = sorted(path.name for path in Path(folder).iterdir())
        again = make_trainer(make_strategy(MESH, FOLDERS), 2, max_steps=11, max_epochs=-1)
        again.fit(module, ckpt_path=saver.best_model_path or saver.last_model_path, weights_only=False)
    return saver.last_model_path, written, again.global_step


@pytest.mark.parametrize("name", ["saved"])
def test_model_checkpoint(name, worlds: Worlds, tmp_path: Path) -> None:
    for last, written, step in worlds(2).run(fit_with_callback, str(tmp_path / name)):
        assert written == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"]
        assert Path(last).name == "last.ckpt"
        assert Path(last).is_dir()
        assert step == 11
