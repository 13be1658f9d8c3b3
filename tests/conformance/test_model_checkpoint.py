"""``ModelCheckpoint`` with each of its options: the same names with and without us, and the same weights in them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_autoparallel.checkpoint import consolidate
from tests.conformance.saved import FOLDER, MESHES
from tests.distributed.jobs import Net, make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

# Each group is one training; what tells callbacks of one Trainer apart differs within it.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "monitored": {
        "best": {"monitor": "val", "save_top_k": 2, "filename": "{epoch}-{val:.3f}", "save_last": True},
        "worst": {"monitor": "val", "mode": "max", "save_last": "link", "filename": "a/{step}"},
        "named": {"monitor": "loss", "filename": "{epoch}_{loss:.2f}", "auto_insert_metric_name": False},
        "steps": {"monitor": "loss", "every_n_train_steps": 3, "save_top_k": -1, "save_weights_only": True},
        "verbose": {"monitor": "val", "every_n_epochs": 2, "save_top_k": 3, "verbose": True},
    },
    "plain": {
        "each": {"save_top_k": -1, "save_on_train_epoch_end": True},
        "steps": {"every_n_train_steps": 2, "filename": "same", "save_top_k": -1},
        "over": {"every_n_train_steps": 4, "filename": "same", "enable_version_counter": False, "save_top_k": -1},
        "time": {"train_time_interval": timedelta(0), "save_last": True},
        "none": {"every_n_epochs": 2, "save_top_k": 0, "save_last": True},
        "late": {"every_n_epochs": 3, "save_on_train_epoch_end": False, "save_last": "link"},
    },
}


class Saved(Net):
    """Its validation loss falls, then rises."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch) + 0.3 * self.current_epoch)


def save(group: str, folder: str, mesh: Mapping[str, int] | None, options: dict[str, Any]) -> tuple[Any, list[float]]:
    """Train with the callbacks of a group, each with a folder of its own below ``folder``; their paths and scores."""
    torch.manual_seed(0)
    module = Saved()
    strategy = make_strategy(mesh, options) if mesh is not None else None

    def loader() -> Any:
        shard = (0, 1) if strategy is None else (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)
        return module.loader(*shard)

    module.train_dataloader = module.val_dataloader = loader
    savers = {name: ModelCheckpoint(f"{folder}/{name}", **chosen) for name, chosen in OPTIONS[group].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            strategy, 2 if mesh else 1, max_epochs=3, callbacks=[*savers.values()], enable_checkpointing=True
        )
        trainer.fit(module)

    def below(path: str) -> str:
        return os.path.relpath(os.path.realpath(path), os.path.realpath(folder)) if path else ""

    return {
        name: (below(saver.best_model_path), below(saver.last_model_path), sorted(map(below, saver.best_k_models)))
        for name, saver in savers.items()
    }, [
        float(score)
        for saver in savers.values()
        for score in (saver.best_model_score, saver.current_score)
        if score is not None
    ]


def names_in(folder: Path) -> list[str]:
    """Checkpoints and links to them, by their paths below ``folder``."""
    found = list(folder.rglob("*.ckpt"))
    return sorted(f"{path.relative_to(folder)}{' link' if path.is_symlink() else ''}" for path in found)


@pytest.mark.parametrize("as_folder", tiered([False, True], lambda folder: folder))
@pytest.mark.parametrize("group", tiered(OPTIONS, "monitored".__eq__))
def test_the_same_checkpoints_are_written(group: str, as_folder: bool, worlds: Worlds, tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    expected = save(group, str(plain), None, {})
    options = FOLDER if as_folder else {}
    for seen in worlds(2).run(save, group, str(ours), MESHES["2"], options):
        assert seen[0] == expected[0]
        torch.testing.assert_close(seen[1], expected[1], rtol=1e-5, atol=1e-6)
    assert names_in(ours) == names_in(plain)
    for name in names_in(plain):
        path = ours / name.removesuffix(" link")
        assert path.is_dir() == as_folder
        if as_folder:
            consolidate(str(path), str(tmp_path / "file.ckpt"))
            path = tmp_path / "file.ckpt"
        of_one = torch.load(plain / name.removesuffix(" link"), weights_only=False)
        of_two = torch.load(path, weights_only=False)
        assert of_two["global_step"] == of_one["global_step"]
        assert ("optimizer_states" in of_two) == ("optimizer_states" in of_one)
        torch.testing.assert_close(dict(of_two["state_dict"]), dict(of_one["state_dict"]), rtol=1e-5, atol=1e-6)


class Breaks(Saved):
    """On some ranks, in the second epoch."""

    ranks: tuple[int, ...] = (0, 1)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.current_epoch == 1 and self.trainer.global_rank in self.ranks:
            raise ValueError("stop here")


class BreaksAlone(Breaks):
    ranks = (1,)


def broken(kind: type[Breaks], folder: str, mesh: Mapping[str, int] | None) -> str:
    """How a training ends that saves when it fails."""
    torch.manual_seed(0)
    module = kind()
    strategy = make_strategy(mesh, {}) if mesh is not None else None
    module.train_dataloader = lambda: module.loader(0 if strategy is None else strategy.mesh.data_parallel_rank, 2)
    savers = [
        OnExceptionCheckpoint(folder),
        ModelCheckpoint(f"{folder}/own", filename="{step}", save_on_exception=True, every_n_epochs=5),
    ]
    trainer = make_trainer(strategy, 2 if mesh else 1, max_epochs=2, callbacks=savers, enable_checkpointing=True)
    try:
        trainer.fit(module)
    except Exception as error:
        original = error.__context__
        return f"{type(error).__name__}: {error}" + (f" after {original}" if original is not None else "")
    return "no error"


def test_what_is_saved_on_an_error_is_whole(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(2).run(broken, Breaks, str(tmp_path), MESHES["2"]) == ["ValueError: stop here"] * 2
    assert names_in(tmp_path) == ["on_exception.ckpt", "own/step=4.ckpt"]
    for name in names_in(tmp_path):
        saved = torch.load(tmp_path / name, weights_only=True)
        assert saved["global_step"] == 4
        assert {name: value.shape for name, value in saved["state_dict"].items()} == {
            name: value.shape for name, value in Breaks().state_dict().items()
        }


@pytest.mark.matrix
def test_a_rank_that_fails_alone_saves_nothing(worlds: Worlds, tmp_path: Path) -> None:
    other, failed = worlds(2).run(broken, BreaksAlone, str(tmp_path), MESHES["2"])
    assert "no checkpoint is saved: rank 1 saves, and other ranks do something else" in failed
    assert "stop here" in failed
    assert "no error" not in other
    assert names_in(tmp_path) == []
