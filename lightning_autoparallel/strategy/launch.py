"""What must be right before any process trains."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningModule, check_flavour


def check_launch(spec: MeshSpec, world_size: int) -> None:
    """Check the mesh against the processes that the Trainer is about to start.

    Raises:
        ConfigError: they do not fit, or Python runs interactively.
    """
    if world_size > 1 and hasattr(sys, "ps1"):
        raise ConfigError(
            "AutoParallelStrategy starts its processes from a script, which a notebook or interactive Python is not: "
            "write the code to a file and run it, or set devices=1"
        )
    spec.resolve(world_size)


def check_module(module: LightningModule, whole_steps: bool) -> None:
    """Refuse what a LightningModule may not do under this strategy, which is to capture ``whole_steps`` or need not.

    Raises:
        ConfigError: it optimizes by itself and its steps are to be captured whole, it is a module of Lightning's
            other package, or parts of it are TorchScript.
    """
    check_flavour(module)
    scripted = next((path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ConfigError(
            f"{type(module).__name__}.{scripted} is a module of TorchScript, whose code and parameters cannot be "
            "shared out among ranks: keep the module that was given to torch.jit.script or torch.jit.trace (what is "
            "captured of it is compiled), and script it for export after training; one that does not train may stay in "
            "a list (self.teacher = [scripted]), where it is no part of the module"
        )
    if whole_steps and not module.automatic_optimization:
        raise ConfigError(
            f"{place_of(module.training_step)}: {type(module).__name__} sets automatic_optimization=False: a step that "
            'optimizes by itself cannot be captured whole; use capture="auto" or "forward", or return the loss from '
            "training_step"
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Whether an optimizer can work on shards.

    Raises:
        ConfigError: it shares out its state by itself.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ConfigError(
            "ZeroRedundancyOptimizer shares out its state among ranks, which the strategy does by itself: return the "
            "optimizer of the class that it is given"
        )


def check_trained(optimizer: Optimizer) -> None:
    """Whether all that an optimizer trains lies in shards.

    Raises:
        ConfigError: something does not.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            raise ConfigError(
                f"{type(optimizer).__name__} trains a tensor of shape {tuple(parameter.shape)} that was no parameter "
                "of the LightningModule when training began: ranks share out its parameters then, and this tensor "
                "would be trained on each rank by itself; make it one in __init__ or configure_model"
            )


def place_of(step: Callable[..., Any]) -> str:
    """Where a step is defined, as messages name lines."""
    code = inspect.unwrap(step).__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
