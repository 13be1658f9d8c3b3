"""The LightningModule that trains Llama 3; written for one device."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from lightning_autoparallel.checkpoint import load_weights
from lightning_autoparallel.lightning_compat import LightningModule, OptimizerLRSchedulerConfig
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.models.llama3_hugging_face import llama3_weights

Batch = dict[str, Tensor]


class Llama3Module(LightningModule):
    """Next-token training of a Llama 3 network.

    A batch holds `inputs` and `targets`, each (B, T) int64, the targets one token ahead. Losses are mean
    nats per token.

    Args:
        size: a key of `LLAMA3_SIZES`.
        overrides: fields of `Llama3Config` to replace.
        lr: peak learning rate of AdamW.
        weight_decay: of matrices; norm gains are not decayed.
        betas: AdamW's moment decays.
        warmup_steps: optimizer steps of linear warm-up.
        max_steps: optimizer steps after which the cosine has come down to `min_lr_ratio * lr`.
        min_lr_ratio: final share of the learning rate.
        weights: what training starts from, read where the model is built or, by AutoParallelStrategy, into each rank's
            shards: a folder of Hugging Face's `LlamaForCausalLM` (`config.json` and safetensors files), or a
            checkpoint of this module, file or folder.

    Raises:
        ConfigError: the size or an override is unknown or inconsistent.
        CheckpointError: when the model is built, if `weights` are not there or those of another network.
    """

    def __init__(
        self,
        size: str = "debug",
        overrides: dict[str, Any] | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 20,
        max_steps: int = 1000,
        min_lr_ratio: float = 0.1,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="weights")  # checkpoints hold weights of their own
        self.config = llama3_config(size, overrides)
        self.weights = weights
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.lr_factor = partial(
            warmup_cosine, warmup_steps=warmup_steps, max_steps=max_steps, min_lr_ratio=min_lr_ratio
        )
        self.model: Llama3 | None = None
        # Checking for NaN would read the value on the host at every update.
        self.val_mean_loss = MeanMetric(nan_strategy="disable")
        self._batch_began_s: float | None = None

    def configure_model(self) -> None:
        """Build the network, once; Lightning calls this before every fit, validation, test or prediction."""
        if self.model is not None:
            return
        if self.weights is None:
            self.model = Llama3(self.config)
            return
        with torch.device("meta"):
            self.model = Llama3(self.config)
        load_weights(self, partial(llama3_weights, self.weights, self.config), into="model")

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab_size) for token ids (B, T)."""
        assert self.model is not None, "configure_model runs before forward"
        return self.model(tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's mean loss, logged as `train_loss`."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `val_loss` and gather it for the perplexity."""
        loss = self._loss(batch)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True, prog_bar=True)
        self.val_mean_loss.update(loss)

    def on_validation_epoch_end(self) -> None:
        """Log `val_perplexity`, the exponential of the mean loss."""
        self.log("val_perplexity", self.val_mean_loss.compute().exp(), prog_bar=True, sync_dist=True)
        self.val_mean_loss.reset()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log `test_loss`."""
        self.log("test_loss", self._loss(batch), on_epoch=True, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next token at every position, (B, T) int64."""
        return self(batch["inputs"]).argmax(-1)

    def on_train_epoch_start(self) -> None:
        """Leave the time between epochs out of the throughput."""
        self._batch_began_s = None

    def on_validation_start(self) -> None:
        """Leave validation's time out of the throughput."""
        self._batch_began_s = None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Start the clock, unless it runs since the last batch ended."""
        if self._batch_began_s is None:
            self._batch_began_s = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log `tokens_per_second`, measured over all data-parallel ranks from one batch's end to the next.

        That span includes loading, and on an accelerator, where a step returns before its work is done, it settles at
        the true time per step once the queue of launches is full.
        """
        now_s = time.perf_counter()
        assert self._batch_began_s is not None, "on_train_batch_start runs first"
        ranks = getattr(self.trainer.strategy, "data_parallel_size", self.trainer.world_size)
        tokens = batch["inputs"].numel() * ranks
        self.log("tokens_per_second", tokens / (now_s - self._batch_began_s), prog_bar=True)
        self._batch_began_s = now_s

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with linear warm-up and cosine decay, stepped once per optimizer step."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: Batch) -> Tensor:
        logits = self(batch["inputs"]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def warmup_cosine(step: int, *, warmup_steps: int, max_steps: int, min_lr_ratio: float) -> float:
    """Share of the peak learning rate at an optimizer step (from 0): a linear rise, then half a cosine wave.

    The rise starts at `1 / warmup_steps`; from `max_steps` on the share is `min_lr_ratio` (Loshchilov and Hutter 2017,
    equation 5, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
