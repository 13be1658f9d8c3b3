"""Graphs are compiled once: by one rank of those that share a cache, and by none when the job starts again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run

SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

import lightning_autoparallel

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(24, 32, generator=torch.Generator().manual_seed(3)), batch_size=4)

    val_dataloader = train_dataloader

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"<{self.trainer.global_rank} {batch_idx} {float(outputs['loss']):.6f}>", flush=True)

seed_everything(0)
strategy = lightning_autoparallel.AutoParallelStrategy(mesh={"dp_shard": 2}, plan="fsdp", compile=True)
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module())
seen = counters["inductor"]
print("modes", sorted(strategy.modes.items()), flush=True)
print(f"({trainer.global_rank}: {seen['fxgraph_cache_hit']} found, {seen['fxgraph_cache_miss']} compiled)", flush=True)
"""


def started(folder: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """The losses that ranks print, and by rank how many graphs were found compiled, and how many were not."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (output,) = run([sys.executable, str(script)], TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    assert "modes [('training_step', 'step'), ('validation_step', 'step')]" in output, output
    losses = sorted(re.findall(r"<\d \d [\d.]+>", output))  # ranks may share a line
    counts = sorted(re.findall(r"\((\d): (\d+) found, (\d+) compiled\)", output))
    return losses, [(int(found), int(compiled)) for _, found, compiled in counts]


@pytest.mark.matrix
def test_one_rank_compiles_and_the_second_start_nothing(tmp_path: Path):
    losses, counts = started(tmp_path)
    assert len(losses) == 6
    assert counts == [(0, 3), (3, 0)]  # forward, backward and validation: one rank compiles, the other waits for it
    assert started(tmp_path) == (losses, [(3, 0), (3, 0)])
