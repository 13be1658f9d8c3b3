"""Train one case and say what came out: alone in this process, or as one rank of a world."""

from __future__ import annotations

import logging
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_autoparallel import AutoParallelStrategy
from tests.support.slow_memory import SLOW_MEMORY
from tests.thirdparty.built import Built
from tests.thirdparty.registry import build

# `nudged` is plain from weights changed in their last bit: how far rounding alone carries the training.
# `tp` is ours on two axes, by rates that have small layers cut; `gpu` is ours alone on one, `gpu_plain` plain there.
RANKS = {"plain": 1, "nudged": 1, "ddp": 2, "ours": 2, "tp": 4, "gpu": 1, "gpu_plain": 1}
ON_GPU = ("gpu", "gpu_plain")
NUDGE = 6e-8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process saw: losses of all steps, weights before, all state after, or the error that ended it."""

    losses: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    mode: str = ""
    notice: str = ""  # why the step is not captured whole
    error: str = ""
    trace: str = ""


class _Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if isinstance(outputs, dict) and "loss" in outputs:
            self.values.append(float(outputs["loss"]))


def train(name: str, side: str) -> Outcome:
    """Train case `name` on one `side`; an error is the outcome too."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # in a process of its own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = _train(build(name), side)
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    said = [str(warning.message) for warning in caught]
    return replace(outcome, notice=next((text for text in said if "training_step runs in forward mode" in text), ""))


def _train(built: Built, side: str) -> Outcome:
    if side == "nudged":
        _nudge(built)
    if side in ON_GPU:
        torch.backends.cudnn.allow_tf32 = False  # in a process of its own
    before = {name: _full(weight) for name, weight in built.module.named_parameters()}
    losses = _Losses()
    strategy = _strategy(side)
    trainer = Trainer(
        accelerator="gpu" if side in ON_GPU else "cpu",
        devices=RANKS[side],
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tempfile.gettempdir(),
        callbacks=[losses],
    )

    def loader() -> DataLoader:
        rank, shards = trainer.global_rank, trainer.world_size
        if isinstance(strategy, AutoParallelStrategy):
            rank, shards = strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size
        return DataLoader([built.rows(batch, rank, shards) for batch in built.batches], batch_size=None)

    built.module.train_dataloader = loader
    trainer.fit(built.module)
    modes = getattr(strategy, "modes", {})
    mode = modes.get("training_step", "step") if isinstance(strategy, AutoParallelStrategy) else ""
    return Outcome(losses=losses.values, before=before, after=_state(built), mode=mode)


def _nudge(built: Built) -> None:
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.module.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=random))


def _strategy(side: str) -> Any:
    if side in ("ours", "gpu"):
        return AutoParallelStrategy(mesh={"dp_shard": -1}, compile=False)
    if side == "tp":
        return AutoParallelStrategy(mesh={"dp_shard": 2, "tp": 2}, hardware=dict(SLOW_MEMORY), compile=False)
    return DDPStrategy(find_unused_parameters=True) if side == "ddp" else "auto"


def _state(built: Built) -> dict[str, Tensor]:
    """Parameters and buffers in full: those of the module, not of its metrics."""
    tensors = {**dict(built.module.named_parameters()), **dict(built.module.named_buffers())}
    return {name: _full(tensor) for name, tensor in tensors.items()}


def _full(tensor: Tensor) -> Tensor:
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().cpu().clone()
