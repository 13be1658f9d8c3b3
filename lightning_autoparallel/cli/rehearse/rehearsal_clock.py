"""The callback that measures a rehearsal: times of some steps, then the memory of one more."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer
from lightning_autoparallel.strategy.rehearsal import RehearsalStrategy
from lightning_autoparallel.torch_compat.allocations import PeakAbove, peak_on_cpu, peak_on_cuda
from lightning_autoparallel.torch_compat.tree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What one rank was measured to take: bytes of tensors, and milliseconds of each timed step."""

    parameters_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    step_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Of the timed steps."""
        return statistics.median(self.step_ms)


class RehearsalClock(Callback):
    """Times ``steps`` optimizer steps after ``warmup`` others, measures the memory of two more, and ends the fit."""

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._steps = warmup, steps
        self._starts: list[float] = []
        self._measuring = contextlib.ExitStack()
        self._peak: PeakAbove | None = None
        self._held: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note when a step begins; behind the timed ones count what is held, and what is allocated from here on."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        _finish_work(trainer.strategy.root_device)
        self._starts.append(time.perf_counter())
        if len(self._starts) == self._warmup + self._steps + 1:
            for optimizer in trainer.optimizers:  # their gradients' end would not be seen
                optimizer.zero_grad(set_to_none=True)
            self._held = _held(trainer, pl_module, batch)
            self._peak = self._measuring.enter_context(_peak_on(trainer.strategy.root_device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End behind the second step whose memory is measured: it begins with the gradients of the first."""
        ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if ends and len(self._starts) == self._warmup + self._steps + 2:
            self._measuring.close()
            trainer.should_stop = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What measures memory ends with the fit."""
        self._measuring.close()

    def result(self) -> Rehearsed:
        """What was measured, after the fit.

        Raises:
            ConfigError: the fit ended early.
        """
        needed = self._warmup + self._steps + 2
        if len(self._starts) < needed:
            raise ConfigError(
                f"training ended after {len(self._starts)} steps, but --warmup and --steps need {needed} with two for "
                "memory: lower them"
            )
        assert self._peak is not None
        timed = self._starts[self._warmup : self._warmup + self._steps + 1]
        return Rehearsed(
            parameters_bytes=self._held["parameters"],
            optimizer_bytes=self._held["optimizer"],
            peak_bytes=sum(self._held.values()) + self._peak.peak_bytes,
            step_ms=tuple((after - before) * 1e3 for before, after in pairwise(timed)),
        )


def _held(trainer: Trainer, module: LightningModule, batch: Any) -> dict[str, int]:
    """Bytes that are there before a step."""
    strategy = trainer.strategy
    assert isinstance(strategy, RehearsalStrategy)
    parameters = list(_storages(module.parameters()))
    state = [tree_leaves(list(optimizer.state.values())) for optimizer in trainer.optimizers]
    optimizer = list(_storages(leaf for leaves in state for leaf in leaves))
    others = [*module.buffers(), *tree_leaves(batch), *strategy.constants]
    return {
        "parameters": sum(parameters),
        "optimizer": sum(optimizer),
        "others": sum(_storages(others)),
    }


def _storages(values: Iterable[Any]) -> Iterator[int]:
    """Bytes of the storages of tensors, or of this rank's shards of them, each once."""
    tensors = [_local(value) for value in values if isinstance(value, Tensor)]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return iter(found.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _peak_on(device: torch.device) -> contextlib.AbstractContextManager[PeakAbove]:
    return peak_on_cuda(device) if device.type == "cuda" else peak_on_cpu()


def _finish_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
