"""The device that a plan's steps are captured for: a GPU of this machine, or one that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_autoparallel.cost import HardwareSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningModule, MixedPrecision
from lightning_autoparallel.torch_compat import cuda_guards

CPU, CUDA = "cpu", "cuda"
_MIXED = {"16-mixed": "16-mixed", "16": "16-mixed", "bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed"}
_CAPABILITIES = {"a100-80gb": (8, 0), "b200": (10, 0), "mi300x": (9, 4)}
_HOPPER = (9, 0)


@dataclass(frozen=True)
class PlannedDevice:
    """The device ``kind``, on which fake tensors of a step lie while it is planned.

    Raises:
        ConfigError: it is neither ``"cpu"`` nor ``"cuda"``, or torch cannot trace for it in this process.
    """

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in (CPU, CUDA):
            raise ConfigError(f"device={self.kind!r} must be 'cpu' or 'cuda': plans are made for these")
        if self.kind == CUDA and needs_guards():
            raise ConfigError(
                "device='cuda' needs a GPU in this process, or one that was started for planning without: run "
                "`lightning-autoparallel plan --device cuda`, which starts it so, or start Python with what "
                "`lightning_autoparallel.torch_compat.cuda_guards.environment_with_guards()` returns as its environment"
            )

    @property
    def is_missing(self) -> bool:
        """Whether nothing but fake tensors may lie there."""
        return self.kind == CUDA and not torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        if self.kind == CPU:
            return torch.device(CPU)
        return torch.device(CUDA, 0 if self.is_missing else torch.cuda.current_device())

    @contextlib.contextmanager
    def seeming(self, hardware: HardwareSpec | None) -> Iterator[None]:
        """Inside, Python that asks for CUDA hears what it will where it trains, on ``hardware``."""
        if not self.is_missing:
            yield
            return
        name = "h100" if hardware is None else hardware.name
        with cuda_guards.seeming_cuda(name, _CAPABILITIES.get(name, _HOPPER)):
            yield

    def precision_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What a Trainer on a CPU is given in their place: Lightning would have it mix precisions as CPUs do."""
        precision = _MIXED.get(str(options.get("precision")))
        if self.kind == CPU or precision is None:
            return {}
        with self.seeming(None):
            return {"precision": None, "plugins": [MixedPrecision(precision, self.kind)]}  # type: ignore[arg-type]


@contextlib.contextmanager
def lying_on(device: torch.device, module: nn.Module) -> Iterator[None]:
    """Inside, LightningModules in ``module`` say that they lie on ``device``."""
    parts = [part for part in module.modules() if isinstance(part, LightningModule)]
    before = [part._device for part in parts]
    for part in parts:
        part._device = device
    try:
        yield
    finally:
        for part, had in zip(parts, before, strict=True):
            part._device = had


def needs_guards() -> bool:
    """Whether this process cannot trace for CUDA yet."""
    return not torch.cuda.is_available() and not cuda_guards.are_loaded()
