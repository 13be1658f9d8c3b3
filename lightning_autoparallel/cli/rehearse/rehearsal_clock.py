"""The callback that measures a rehearsal: times of some steps, then the memory of one more."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    """Times ``steps`` optimizer steps after ``warmup`` others, measures the memory of two more, and ends the fit.

    A step is timed from its first batch to the end of its last: reading data ahead of it is not counted. It is the only
    callback: a module's own could write checkpoints of what means nothing.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._steps = warmup, steps
        self._began_s = 0.0
        self._shapes: list[tuple[int, ...]] | None = None
        self._step_ms: list[float] = []  # of all steps that came to their end
        self._measuring = contextlib.ExitStack()
        self._peak: PeakAbove | None = None
        self._held: dict[str, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave out what the module has brought."""
        trainer.callbacks = [self]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Schedulers that follow what is not computed here stand still."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note when a step begins; behind the timed ones count what is held, and what is allocated from here on.

        Raises:
            ConfigError: the batch is of another shape than those before.
        """
        self._check_shapes(batch)
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if len(self._step_ms) == self._warmup + self._steps and self._peak is None:
            for optimizer in trainer.optimizers:  # their gradients' end would not be seen
                optimizer.zero_grad(set_to_none=True)
            self._held = _held(trainer, pl_module)
            self._peak = self._measuring.enter_context(_peak_on(trainer.strategy.root_device))
        _finish_work(trainer.strategy.root_device)
        self._began_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End behind the second step whose memory is measured: it begins with the gradients of the first."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        _finish_work(trainer.strategy.root_device)
        self._step_ms.append((time.perf_counter() - self._began_s) * 1e3)
        if len(self._step_ms) >= self._warmup + self._steps + 2:
            self._measuring.close()
            trainer.should_stop = True

    def _check_shapes(self, batch: Any) -> None:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise ConfigError(
                f"rank 0 has batches of {self._shapes} and of {shapes}: each is a step of its own, with its own memory "
                "and time; drop what is shorter (drop_last=True, --trainer.limit_train_batches N), or pad to one length"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What measures memory ends with the fit."""
        self._measuring.close()

    def result(self) -> Rehearsed:
        """What was measured, after the fit.

        Raises:
            ConfigError: the fit ended early.
        """
        needed = self._warmup + self._steps + 2
        if len(self._step_ms) < needed:
            raise ConfigError(
                f"training ended after {len(self._step_ms)} steps, but --warmup and --steps need {needed} with two for "
                "memory: lower them"
            )
        assert self._peak is not None
        above = 0 if self._peak.is_of_all else sum(self._held.values())
        return Rehearsed(
            parameters_bytes=self._held["parameters"],
            optimizer_bytes=self._held["optimizer"],
            peak_bytes=above + self._peak.peak_bytes,
            step_ms=tuple(self._step_ms[self._warmup : self._warmup + self._steps]),
        )


def _held(trainer: Trainer, module: LightningModule) -> dict[str, int]:
    """Bytes that are there before a step, the batch apart: that of the second one is made while memory is measured."""
    strategy = trainer.strategy
    assert isinstance(strategy, RehearsalStrategy)
    parameters = list(_storages(module.parameters()))
    state = [tree_leaves(list(optimizer.state.values())) for optimizer in trainer.optimizers]
    optimizer = list(_storages(leaf for leaves in state for leaf in leaves))
    others = [*module.buffers(), *strategy.constants]
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
