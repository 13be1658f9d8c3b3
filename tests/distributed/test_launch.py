"""A script that torchrun starts, and one that starts its own processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

import lightning_autoparallel

class Printing(BoringModel):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(12, 32, generator=generator), batch_size=BATCH)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        rank = self.trainer.global_rank
        print(f"<{rank} {batch_idx} {len(batch)} {float(outputs['loss']):.6f}>", flush=True)

torch.manual_seed(0)
BATCH = 2
trainer = Trainer(accelerator="cpu", devices=2, strategy=STRATEGY, max_epochs=1, limit_val_batches=0, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Printing())
"""
STRATEGIES = {
    "by name": '"autoparallel"',
    "by object": 'lightning_autoparallel.AutoParallelStrategy(mesh={"dp_shard": -1}, plan="ddp", compile=False)',
}
REPOSITORY = Path(__file__).parents[2]
OURS = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_", "TORCHELASTIC")


def run(command: list[str]) -> str:
    """The output of a command that must succeed, without the variables of another launch."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", MASTER_PORT=str(_free_port()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("launcher", "strategy"), [("torchrun", "by object"), ("lightning", "by object"), ("lightning", "by name")]
)
def test_both_launchers(launcher, strategy, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STRATEGY", STRATEGIES[strategy]))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(_free_port())]
    output = run([sys.executable, *(torchrun if launcher == "torchrun" else []), str(script)])
    steps = {rank: re.findall(rf"<{rank} (\d+) (\d+) ([\d.]+)>", output) for rank in (0, 1)}
    assert [index for index, _, _ in steps[0]] == ["0", "1", "2"]
    assert steps[0] == steps[1]
    assert {rows for _, rows, _ in steps[0]} == {"2"}  # the sampler was sharded: 12 rows, 2 ranks, 3 steps
    assert "autoparallel: mesh {dp_shard: 2}" in output
