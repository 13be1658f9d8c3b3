"""A script that torchrun starts, and one that starts its own processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.scripts import free_port, run

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
trainer = Trainer(accelerator="cpu", devices=DEVICES, num_nodes=NODES, strategy=STRATEGY, max_epochs=1,
                  limit_val_batches=0, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Printing())
"""
STRATEGIES = {
    "by name": '"autoparallel"',
    "by object": 'lightning_autoparallel.AutoParallelStrategy(mesh={"dp_shard": -1}, plan="ddp", compile=False)',
    "by object, a backend for each device": (
        "lightning_autoparallel.AutoParallelStrategy("
        'mesh={"dp_shard": -1}, plan="fsdp", compile=False, process_group_backend="cpu:gloo,cuda:gloo")'
    ),
}


def script_in(folder: Path, strategy: str, devices: int, nodes: int) -> str:
    script = folder / "train.py"
    settings = {"STRATEGY": STRATEGIES[strategy], "DEVICES": str(devices), "NODES": str(nodes)}
    text = SCRIPT
    for name, value in settings.items():
        text = text.replace(name, value)
    script.write_text(text)
    return str(script)


def check_steps(output: str) -> None:
    """Both ranks ran three steps on two rows each of twelve, with one loss."""
    steps = {rank: re.findall(rf"<{rank} (\d+) (\d+) ([\d.]+)>", output) for rank in (0, 1)}
    assert [index for index, _, _ in steps[0]] == ["0", "1", "2"]
    assert steps[0] == steps[1]
    assert {rows for _, rows, _ in steps[0]} == {"2"}  # the sampler was sharded: 12 rows, 2 ranks, 3 steps
    assert "autoparallel: mesh {dp_shard: 2}" in output


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        pytest.param("torchrun", "by object", marks=pytest.mark.matrix),
        pytest.param("lightning", "by object, a backend for each device", marks=pytest.mark.matrix),
        ("lightning", "by name"),
    ],
)
def test_both_launchers(launcher, strategy, tmp_path: Path) -> None:
    script = script_in(tmp_path, strategy, devices=2, nodes=1)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    (output,) = run([sys.executable, *(torchrun if launcher == "torchrun" else []), script])
    check_steps(output)


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_two_nodes_of_one_process(launcher, tmp_path: Path) -> None:
    script = script_in(tmp_path, "by object", devices=1, nodes=2)
    port = str(free_port())
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-port", port]
    commands = [
        [sys.executable, *([*torchrun, "--node-rank", str(node)] if launcher == "torchrun" else []), script]
        for node in range(2)
    ]
    check_steps("".join(run(*commands, MASTER_ADDR="127.0.0.1")))
