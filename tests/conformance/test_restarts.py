"""What torchrun starts again goes on from the last checkpoint, and ends as a run that nothing happened to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_autoparallel.checkpoint import put_back_in
from tests.conformance.saved import ALL, HALF, Place, go
from tests.support.scripts import run

pytestmark = pytest.mark.conformance


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_torchrun_restarts_a_killed_training(kind: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    run([sys.executable, *torchrun, "-m", "tests.conformance.restarted", str(tmp_path), kind])
    seen = json.loads((tmp_path / "seen.json").read_text())
    expected = go(Place("plain"), ALL, None, None)
    assert (seen["restarts"], seen["step"], len(seen["losses"])) == (1, ALL, ALL - HALF)
    assert seen["losses"] == pytest.approx(expected.losses[HALF:], rel=1e-5)
    assert seen["scale"] == pytest.approx(float(expected.ended["scale"]), rel=1e-5)
    assert (tmp_path / "last.ckpt").is_dir() == (kind == "folder")


def test_the_last_checkpoint_is_found_where_its_replacement_was_killed(tmp_path: Path) -> None:
    folder, file = tmp_path / ".last.ckpt.replaced", tmp_path / ".other.ckpt.replaced"
    folder.mkdir()
    file.touch()
    (tmp_path / "other.ckpt").touch()  # was replaced
    put_back_in(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, "last.ckpt", "other.ckpt"]
    put_back_in(tmp_path / "missing")
