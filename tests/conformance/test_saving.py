"""What is saved, where, and what happens where it cannot be."""

from __future__ import annotations

import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_autoparallel.cli.main import main
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.strategy import saving
from tests.conformance import saved
from tests.conformance.saved import ALL, FOLDER, HALF, Place, Run, go, train
from tests.distributed.jobs import make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import WorldError, Worlds

pytestmark = pytest.mark.conformance

WAYS: list[dict[str, Any]] = [{}, FOLDER, {"async_save": True}, {**FOLDER, "async_save": True}]
TWO = Place("2")


def train_with_limit(limit: int, path: str) -> list[str]:
    """What was said of a run whose checkpoints are files up to `limit` bytes."""
    said: list[str] = []
    with mock.patch.object(saving, "FILE_LIMIT_BYTES", limit), mock.patch.object(saving, "rank_zero_info", said.append):
        train(path, (1, 2), {})
    return said


@pytest.mark.parametrize("large", tiered([False, True], bool))
def test_small_states_are_files_and_large_ones_folders(large: bool, worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "run{}.ckpt")
    for said in worlds(2).run(train_with_limit, 100 if large else 10**6, path):
        assert len(said) == 1
        assert ("folders of every rank's shards" if large else "single files") in said[0]
        assert "the whole state has " in said[0]
    assert [(tmp_path / f"run{step}.ckpt").is_dir() for step in (1, 2)] == [large] * 2


@pytest.mark.parametrize("options", tiered(WAYS, lambda options: options == WAYS[-1]), ids=str)
def test_saving_changes_no_training(options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    """Not even before the first step, where optimizers have no state yet; and what is read is what was then."""
    path = str(tmp_path / "run{}.ckpt")
    expected = go(Place("plain"), ALL, None, None)
    for losses, ended in worlds(2).run(train, path, (0, HALF), options):
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(ended, expected.ended, rtol=1e-4, atol=1e-5)
    for step in (0, HALF):
        for resumed in worlds(2).run(go, TWO, ALL, None, path.format(step)):
            assert resumed.losses == losses[step:]
            torch.testing.assert_close(resumed.ended, ended, rtol=0, atol=0)


def written(worlds: Worlds, tmp_path: Path) -> str:
    """A folder of a run on two ranks."""
    path = str(tmp_path / "run{}.ckpt")
    worlds(2).run(train, path, (HALF,), FOLDER)
    return path.format(HALF)


def test_a_folder_becomes_the_file_that_one_device_reads(worlds: Worlds, tmp_path: Path, capsys) -> None:
    folder, file, expected = written(worlds, tmp_path), str(tmp_path / "one.ckpt"), go(Place("plain"), ALL, None, None)
    assert main(["consolidate", folder, file]) == 0
    assert capsys.readouterr().out.strip() == file
    resumed = go(Place("plain"), ALL, None, file)
    torch.testing.assert_close(resumed.losses, expected.losses[HALF:], rtol=1e-5, atol=0)
    torch.testing.assert_close(resumed.ended, expected.ended, rtol=1e-4, atol=1e-5)
    Run.load_from_checkpoint(file)
    assert main(["consolidate", str(tmp_path), file]) == 1
    assert "is no checkpoint" in capsys.readouterr().err


def test_lightnings_own_tool_reads_a_folder(worlds: Worlds, tmp_path: Path) -> None:
    folder = written(worlds, tmp_path)
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    Run.load_from_checkpoint(f"{folder}.consolidated")


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path(self.mark).touch, ()


def load(folder: str, **options: Any) -> str:
    module = Run()
    module.train_dataloader = lambda: module.loader(0, 1)
    trainer = make_trainer(make_strategy({"dp_shard": 1}, {}), 1, max_steps=ALL, max_epochs=-1)
    try:
        trainer.fit(module, ckpt_path=folder, **options)
    except CheckpointError as error:
        return str(error)
    return "no error"


def load_trusting(folder: str) -> str:
    return load(folder, weights_only=False)


@pytest.mark.parametrize("where", tiered([".metadata", "meta.pt"], ".metadata".__eq__))
def test_nothing_is_unpickled_from_a_file_of_a_stranger(where: str, worlds: Worlds, tmp_path: Path) -> None:
    folder, mark = written(worlds, tmp_path), tmp_path / "mark"
    (text,) = worlds(1).run(load, folder)
    assert text == "no error"
    with open(f"{folder}/{where}", "wb") as file:
        pickle.dump(Evil(str(mark)), file) if where == ".metadata" else torch.save(Evil(str(mark)), file)
    (text,) = worlds(1).run(load, folder)
    assert "give weights_only=False to the Trainer's method" in text
    assert not mark.exists()
    with pytest.raises(WorldError):  # what is no checkpoint cannot be loaded, but now it was asked for
        worlds(1).run(load_trusting, folder)
    assert mark.exists()


def fail(path: str, options: dict[str, Any], at: tuple[int, ...]) -> tuple[str, list[float]]:
    """Train while rank 1 (rank 0 for files) may write no file of more than 2 kB from the second save on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    real, calls = saving.SavingStrategy.save_checkpoint, []

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        self.wait_for_checkpoint()  # the first is to succeed
        if len(calls) == 2 and dist.get_rank() == (1 if options.get("save_distributed_checkpoint") else 0):
            self.wait_for_checkpoint()  # the first one may be on its way
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        real(self, *args, **kwargs)

    try:
        with mock.patch.object(saving.SavingStrategy, "save_checkpoint", save):
            train(path, at, options)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


@pytest.mark.parametrize("options", tiered(WAYS, lambda options: options == WAYS[-1]), ids=str)
def test_a_write_that_fails_is_everybodys_error_and_leaves_what_was_there(options, worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    for text in worlds(2).run(fail, path, options, (1, HALF)):
        assert "File too large" in text
    for resumed in worlds(2).run(go, TWO, ALL, None, path):
        assert len(resumed.losses) == ALL - 1


@pytest.mark.parametrize("options", tiered([{}, FOLDER], bool), ids=str)
def test_a_place_that_cannot_be_written(options, worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in worlds(2).run(fail, str(tmp_path / "file" / "run.ckpt"), options, (1,)):
        assert "Error" in text
        assert str(tmp_path / "file") in text


class KeepsTheStart(Run):
    """Pulls its weights to those of the checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.start = checkpoint["state_dict"]["uneven.weight"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (self.uneven.weight - self.start).square().sum()


def resume_and_overwrite(path: str, plan: str, kind: type[Run], overwrite: bool) -> list[float]:
    """Losses of a run that goes on from a file, which then has only zeros."""
    real = saving.SavingStrategy.load_optimizer_state_dict

    def load(self: Any, checkpoint: Any) -> None:
        real(self, checkpoint)
        dist.barrier()
        if overwrite and dist.get_rank() == 0:
            with open(path, "r+b") as file:
                file.write(bytes(Path(path).stat().st_size))
        dist.barrier()

    with (
        mock.patch.object(saving.SavingStrategy, "load_optimizer_state_dict", load),
        mock.patch.object(saved, "Run", kind),
    ):
        return go(Place("2", plan), ALL, None, path).losses


@pytest.mark.parametrize("kind", [Run, KeepsTheStart])
@pytest.mark.parametrize("plan", tiered(["ddp", "fsdp"], "ddp".__eq__))
def test_nothing_of_a_file_is_kept_where_it_lies(plan: str, kind: type[Run], worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "run{}.ckpt")
    worlds(2).run(train, path, (HALF,), {})
    expected, found = (
        worlds(2).run(resume_and_overwrite, path.format(HALF), plan, kind, late) for late in (False, True)
    )
    assert found == expected


def remote(options: dict[str, Any]) -> tuple[list[float], list[float]]:
    losses, _ = train("memory://runs/{}.ckpt", (HALF,), options, {"dp_shard": 1})
    return losses, go(Place("1"), ALL, None, f"memory://runs/{HALF}.ckpt").losses


@pytest.mark.parametrize("options", tiered([{}, FOLDER], bool), ids=str)
def test_other_file_systems(options: dict[str, Any], worlds: Worlds) -> None:
    ((whole, resumed),) = worlds(1).run(remote, options)
    assert resumed == whole[HALF:]
    assert not Path("memory:").exists()
