"""The allocator's peak of a training step on a GPU, beside the predicted one."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_autoparallel.models import Llama3Module
from tests.distributed.jobs import make_strategy, make_trainer

pytestmark = pytest.mark.gpu

STEPS, ROWS, LENGTH = 5, 8, 1024
OVERRIDES = {"dim": 1024, "n_layers": 6, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 32_000}


class Peak(Callback):
    """Bytes alive before the last step, and the most during it."""

    before = peak = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.peak = torch.cuda.max_memory_allocated()


def measured(compiled: bool, checkpointing: str | None) -> tuple[int, int, int]:
    """Bytes of shards and optimizer state, the measured peak, and what was predicted besides shards and state."""
    torch.manual_seed(0)
    module = Llama3Module(size="debug", overrides=OVERRIDES)
    strategy = make_strategy({"dp_shard": 1}, {"compile": compiled, "activation_checkpointing": checkpointing})
    tokens = torch.randint(0, OVERRIDES["vocab_size"], (ROWS, LENGTH + 1))
    batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    module.train_dataloader = lambda: DataLoader([batch] * STEPS, batch_size=None)
    module.val_dataloader = lambda: DataLoader([], batch_size=None)
    peak = Peak()
    make_trainer(strategy, 1, accelerator="gpu", precision="bf16-mixed", callbacks=[peak], limit_val_batches=0).fit(
        module
    )
    predicted = strategy.reports["training_step"].predicted_peak_bytes
    assert predicted is not None
    return peak.before, peak.peak, predicted


@pytest.mark.parametrize("checkpointing", [None, "selective", "full"], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_peaks_are_as_predicted(compiled: bool, checkpointing: str | None, accelerator: str, gpu_world):
    if accelerator == "cpu":
        pytest.skip("only CUDA's allocator counts")
    before, peak, predicted = gpu_world().run(measured, compiled, checkpointing)[0]
    assert peak - before == pytest.approx(predicted, rel=0.1), f"{before=} {peak=} {predicted=}"
