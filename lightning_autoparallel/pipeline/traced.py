"""Calls of a ParallelModule under ``torch.compile``: prepared steps, as one node that AOTAutograd can trace through.

Capturing, comparing ranks and seeding are not for a tracer. Steps are captured before (by ``parallelize``, by
``ParallelModule.prepare`` or by a plain call); ranks are compared and random draws seeded around each real call, by
the backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture import flatten_batch
from lightning_autoparallel.compile import Wiring, retraceable, run_step
from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.pipeline.engine import PreparedStep, StepCall, StepEngine
from lightning_autoparallel.pipeline.results import take_apart, with_statics
from lightning_autoparallel.torch_compat.dynamo import TracedConfigError, is_functionalizing
from lightning_autoparallel.torch_compat.tracing import active_fake_mode
from lightning_autoparallel.torch_compat.tree import tree_unflatten

# A leaf of the batch as constants of the traced code: path, then shape and dtype of a tensor, or the value.
Description = tuple[Any, ...]


class TracedCall:
    """One prepared step: ``run`` becomes a node of Dynamo's graph, ``around`` is entered at every real call."""

    def __init__(self, engine: StepEngine, prepared: PreparedStep) -> None:
        self._engine, self._prepared = engine, prepared
        step = prepared.step
        self.constants = list(step.constants)
        self.spec = step.captured.output_spec
        self.static_outputs: Mapping[int, Any] = dict(step.captured.static_outputs)
        self.run = torch.compiler.allow_in_graph(_node(self, prepared))
        self.run.parallel_call = self
        self._accepted = False

    @property
    def device_type(self) -> str:
        """Of the tensors that the step computes with."""
        return self._engine.device.type

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """Entered, while it traces, by a backend that enters ``around`` at every real call and keeps the partition."""
        before, self._accepted = self._accepted, True
        try:
            yield
        finally:
            self._accepted = before  # another backend may trace the same call next

    def check_backend(self) -> None:
        """Refuse to be traced through by a backend that knows nothing of this node.

        Raises:
            ConfigError: it would neither compare ranks nor seed random draws, and would partition anew.
        """
        if is_functionalizing() and not self._accepted:
            raise ConfigError(
                "torch.compile with this backend would undo what parallelize has planned: give it "
                'backend="autoparallel", or autoparallel_backend(...)'
            )

    @contextlib.contextmanager
    def around(self, batch: Sequence[Tensor | None]) -> Iterator[None]:
        """Compare ranks before the call, and seed its random draws.

        Raises:
            ConfigError: ranks hold batches of different shapes, or different values of a replicated leaf.
        """
        self._engine.check_prepared(self._prepared, batch)
        with self._engine.seeded(self._prepared.step):
            yield


class TracedCalls:
    """The calls of one ParallelModule that were traced, by a key that Dynamo can hold."""

    def __init__(self, engine: StepEngine, call: Callable[[bool], StepCall]) -> None:
        self._engine, self._call = engine, call
        self.known: dict[str, TracedCall] = {}

    @torch.compiler.assume_constant_result
    def find(self, training: bool, modes: tuple[bool, ...], batch: tuple[Description, ...]) -> str:
        """The key in ``known`` of the step for this batch; Dynamo guards what it is given.

        Raises:
            ConfigError: no such step was prepared, or ranks are about to run different ones.
        """
        leaves = [(str(path), _example(*value)) for path, *value in batch]
        try:
            prepared = self._engine.find(self._call(training), leaves)
        except AutoParallelError as error:
            raise TracedConfigError(str(error)) from error
        if prepared is None:
            shown = ", ".join(f"{path}: {_shown(value)}" for path, value in leaves)
            raise TracedConfigError(
                f"torch.compile met a batch that the module was not prepared for ({shown}; "
                f"{'with' if training else 'without'} gradients): call prepare(...) on the parallel module with such a "
                "batch on every rank, or the module itself once outside of torch.compile"
            )
        key = f"{prepared.call.name} on {prepared.layout} in {prepared.module_state}"
        if key not in self.known:
            self.known[key] = TracedCall(self._engine, prepared)
        return key


def call_traced(module: nn.Module, calls: TracedCalls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces in place of ``ParallelModule.forward``."""
    leaves, _ = flatten_batch((args, kwargs))
    parameters, buffers = list(module.parameters()), list(module.buffers())
    training = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
    modes = tuple([submodule.training for submodule in module.modules()])
    call = calls.known[calls.find(training, modes, tuple([_described(path, leaf) for path, leaf in leaves]))]
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    outputs = call.run(parameters, buffers, tensors, call.constants)
    return tree_unflatten(with_statics(outputs, call.static_outputs), call.spec)


def _node(call: TracedCall, prepared: PreparedStep) -> Any:
    step, wiring = retraceable(prepared.step), Wiring.of(prepared.step.partitioned, prepared.layouts)
    buffer_names = [item.name for item in step.captured.inputs if item.kind == "buffer"]

    def parallel_step(
        parameters: list[Tensor], buffers: list[Tensor], batch: list[Tensor], constants: list[Tensor]
    ) -> list[Tensor]:
        call.check_backend()
        given = dataclasses.replace(step, constants=tuple(constants))
        # A backend that runs Dynamo's graph as it is comes here at every real call.
        with call.around(batch) if active_fake_mode() is None else contextlib.nullcontext():
            results = run_step(given, [*parameters, *buffers, *batch], wiring)
        return take_apart(step.captured, results, dict(zip(buffer_names, buffers, strict=True))).outputs

    return parallel_step


def _described(path: str, leaf: Any) -> Description:
    """A leaf as constants. Sizes and numbers that Dynamo would keep symbolic are fixed here: each has its own step."""
    if isinstance(leaf, Tensor):
        return path, tuple([operator.index(size) for size in leaf.shape]), leaf.dtype
    if isinstance(leaf, float):
        return path, leaf.hex()
    if isinstance(leaf, str):
        return path, None, str  # strings name rows: no step depends on them
    return path, operator.index(leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf


def _example(*value: Any) -> Any:
    """A leaf of this description: a tensor without values, or the value."""
    if len(value) == 1:
        return float.fromhex(value[0]) if isinstance(value[0], str) else value[0]
    shape, dtype = value
    return "" if dtype is str else torch.empty(shape, dtype=dtype, device="meta")


def _shown(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
