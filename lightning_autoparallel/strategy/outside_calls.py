"""Calls of the module outside of its steps: hooks and callbacks that sample from it, or look at what it computes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.pipeline.whole_parameters import WholeParameters
from lightning_autoparallel.torch_compat.interception import Original, intercepted_calls


class OutsideCalls:
    """Runs such calls with whole parameters, gathered for each, and without gradients, which no step would reduce.

    Every rank makes the same calls. One that is alone says so, and waits; the others' next step makes it an error.
    """

    def __init__(self, engine: StepEngine) -> None:
        context = engine.context
        self._module = engine.module
        self._control = context.control
        self._parameters = WholeParameters(engine.module, context.mesh, context.control)
        self._own: set[int] = set()
        self._inside = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """From the Trainer's setup to its teardown."""
        self._own = {id(module) for module in self._module.modules()}
        with intercepted_calls(self._call):
            yield

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around steps, which see to their parameters by themselves."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or id(module) not in self._own:
            return original(module, *args, **kwargs)
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return original(module, *args, **kwargs)
        self._meet(type(module).__name__)
        with self.inside(), torch.no_grad(), self._parameters:
            return original(module, *args, **kwargs)

    def _meet(self, name: str) -> None:
        line = user_line()

        def late() -> None:
            warnings.warn(
                f"autoparallel: {line} calls {name} outside of a step on rank {dist.get_rank()}, and waits for ranks "
                "that have not made that call: its parameters lie in shards, so that every rank must (not only where "
                "is_global_zero is True)",
                stacklevel=2,
            )

        if not self._control.meet(place := f"{name} outside of a step", late):
            self._control.gather(place)  # for the others to read
            raise CaptureError(
                f"{line} calls {name} outside of a step, and other ranks do something else: its parameters lie in "
                "shards, so that every rank must make the same call"
            )
