"""The allocator's peak of a training step on a GPU, beside the predicted one."""

from __future__ import annotations

import gc

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_autoparallel.models import Llama3Module
from tests.distributed.jobs import make_strategy, make_trainer

pytestmark = pytest.mark.gpu

STEPS, ROWS, LENGTH = 5, 8, 1024
OVERRIDES = {"dim": 1024, "n_layers": 6, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 32_000}


class Peak(Callback):
    """Bytes of shards and optimizer state, and the most that was alive during the last step."""

    kept = peak = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        gc.collect()  # what a training before this one left behind would go in the middle of a step
        torch.cuda.reset_peak_memory_stats()
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        self.kept = torch.cuda.memory_allocated() - sum(gradient.nbytes for gradient in local)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.peak = torch.cuda.max_memory_allocated()


def measured(compiled: bool, checkpointing: str) -> tuple[int, int]:
    """Bytes that the last step had at its peak besides shards and optimizer state, and those that were predicted."""
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
    return peak.peak - peak.kept, predicted


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_peaks_are_as_predicted(compiled: bool, checkpointing: str, accelerator: str, gpu_world):
    if accelerator == "cpu":
        pytest.skip("only CUDA's allocator counts")
    peak, predicted = gpu_world().run(measured, compiled, checkpointing)[0]
    # Compiled, the head's casts are fused into what reads them: some of the copies that are predicted never exist.
    least, most = (0.8, 1.02) if compiled else (0.97, 1.03)
    assert least * predicted <= peak <= most * predicted, f"{peak=} {predicted=}"
