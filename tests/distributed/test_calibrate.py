"""`calibrate` on real ranks: what it writes is read by predictions, whoever started the ranks."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_autoparallel.cli.calibrate.ranks import running_ranks
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.cost.detect import memory_of
from lightning_autoparallel.cost.links import COLLECTIVES
from lightning_autoparallel.errors import AutoParallelError

COMMAND = ["-m", "lightning_autoparallel.cli.main", "calibrate", "--device", "cpu"]
QUICK = ["--spent-s", "0.001", "--threads", "1", "--dtypes", "float32"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["own", "torchrun"])
def test_rates_are_written_and_read(launcher: tuple[str, ...], tmp_path: Path):
    output = str(tmp_path / "rates.yaml")
    command = COMMAND if not launcher else [*launcher, *COMMAND]
    done = run(*command, *QUICK, "--output", output)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all_gather over dp_shard" in done.stdout and f"--strategy.hardware {output}" in done.stdout
    found = hardware_from(output)
    assert (found.name, found.backend, found.ranks_per_node) == ("cpu measured on 2 ranks", "gloo", 2)
    assert found.memory_bytes == memory_of("cpu") // 2, "two ranks share a host's"
    assert set(found.intra_node.kinds) == set(COLLECTIVES) and set(found.peak_tflops) == {"float32"}


@pytest.mark.matrix
def test_every_axis_of_a_mesh_is_measured_and_all_together():
    done = run(*COMMAND, *QUICK, "--processes", "4", "--mesh", '{"dp_shard": 2, "tp": 2}')
    assert done.returncode == 0, done.stderr[-3000:]
    for axes in ("dp_shard", "tp", "dp_shard,tp"):
        assert f"all_to_all over {axes} " in done.stdout


def test_a_rank_that_fails_is_named_with_what_it_said_last():
    command = ["-c", "print('no such device'); raise SystemExit(3)"]
    with (
        pytest.raises(AutoParallelError, match="rank 1 ended with status 3: no such device"),
        running_ranks(command, "cpu", processes=2, threads=1, timeout=timedelta(seconds=2)),
    ):
        pass
