"""Training steps of small modules, timed by a real Trainer: what a step takes beside its graphs."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_autoparallel.cli.calibrate.samples import StepSample
from lightning_autoparallel.lightning_compat import Callback, LightningModule, OptimizerLRSchedulerConfig, Trainer
from lightning_autoparallel.strategy import AutoParallelStrategy

_LAYERS = (1, 16)
_WIDTH, _ROWS = 64, 8
_WARMUP, _STEPS = 5, 90
_UNCOUNTED = {"step_latency_us": 0.0, "parameter_latency_us": 0.0}


class _Layers(LightningModule):
    """Linear layers one after the other: two parameters each, and next to nothing to compute.

    Around them it does what nearly every module does: it logs its loss, and its learning rate has a schedule.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """A loss of all layers."""
        loss: Tensor = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over all layers, whose rate falls with each step."""
        optimizer = AdamW(self.parameters())
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Clock(Callback):
    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """A batch begins; on a device, once it has finished the one before."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())

    def step_us(self) -> float:
        """The mean from start to start, the first ones left out."""
        return (self.starts[-1] - self.starts[_WARMUP]) / (len(self.starts) - 1 - _WARMUP) * 1e6


def step_samples(device_type: str, local_ranks: int, rates: Mapping[str, Any]) -> Iterator[StepSample]:
    """Steps of modules with few and with many parameters, under fsdp over all ranks.

    ``rates`` predict the graphs, whose time is told apart.
    """
    rows = TensorDataset(torch.randn(_ROWS * dist.get_world_size() * (_WARMUP + _STEPS + 1), _WIDTH))
    for count in _LAYERS:
        clock = _Clock()
        strategy = AutoParallelStrategy(mesh={"dp_shard": -1}, plan="fsdp", hardware={**rates, **_UNCOUNTED})
        with _quiet():
            trainer = _trainer(device_type, local_ranks, strategy, clock)
            trainer.fit(_Layers(count), DataLoader(rows, batch_size=_ROWS))
        predicted_us = strategy.reports["training_step"].whole_step_us
        assert predicted_us is not None, strategy.reports["training_step"].notes
        yield StepSample(parameters=2 * count, time_us=clock.step_us(), graphs_us=predicted_us)


def _trainer(device_type: str, local_ranks: int, strategy: AutoParallelStrategy, clock: Callback) -> Trainer:
    return Trainer(
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=local_ranks,
        num_nodes=dist.get_world_size() // local_ranks,
        strategy=strategy,
        max_steps=_WARMUP + _STEPS + 1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of what a Trainer says is news to somebody who measures."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning_autoparallel")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
