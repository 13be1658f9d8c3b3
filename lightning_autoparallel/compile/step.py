"""Run a CompiledStep under autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.contracts import CompiledStep
from lightning_autoparallel.torch_compat.autograd import release_saved_tensors


class Layout(Protocol):
    """How a parameter lies on this rank; graphs work on shards padded to the same size everywhere."""

    def padded(self, local: Tensor) -> Tensor: ...
    def unpadded(self, local: Tensor) -> Tensor: ...
    def distribute(self, local: Tensor) -> DTensor: ...


def run_step(step: CompiledStep, inputs: Sequence[Tensor], layouts: Sequence[Layout | None]) -> list[Tensor]:
    """The step's outputs that are no gradients, in order; differentiable ones carry a graph to the parameters.

    ``inputs`` are the graph's inputs without constants and tangents, parameters as they are in the module. ``layouts``
    has an entry for each of them, None for what is no sharded parameter.
    """
    if step.backward is None or not torch.is_grad_enabled():
        everything = [_local(tensor, layout) for tensor, layout in zip(inputs, layouts, strict=True)]
        everything += step.constants
        return list(step.forward(everything))[: _results(step)]
    return list(_StepFunction.apply(step, layouts, *inputs))  # type: ignore[no-untyped-call]


def _results(step: CompiledStep) -> int:
    return sum(item.kind != "gradient" for item in step.partitioned.sharded.outputs)


def _local(tensor: Tensor, layout: Layout | None) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    return layout.padded(local) if layout is not None else local


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: CompiledStep, layouts: Sequence[Layout | None], *inputs: Tensor) -> tuple[Tensor, ...]:
        everything = [_local(tensor, layout) for tensor, layout in zip(inputs, layouts, strict=True)]
        everything += step.constants
        by_position = _without_tangents(step, everything)
        kept = [by_position.pop(i) for i in step.partitioned.saved_inputs]
        by_position.clear()  # the forward empties its list: what is read for the last time there is freed there
        produced = list(step.forward(everything))
        count = _results(step)
        results, values = _distinct(produced[:count]), produced[count:]
        ctx.save_for_backward(*kept, *values)
        ctx.step, ctx.layouts, ctx.count = step, layouts, len(inputs)
        ctx.set_materialize_grads(False)
        ctx.shapes = [(result.shape, result.dtype, result.device) for result in results]
        differentiable = _differentiable(step)
        ctx.differentiable = differentiable
        ctx.mark_non_differentiable(*(result for i, result in enumerate(results) if i not in differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tangents = []
        for i in ctx.differentiable:
            shape, dtype, device = ctx.shapes[i]
            gradient = gradients[i]
            tangents.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
        arguments = [*ctx.saved_tensors, *tangents]
        release_saved_tensors(ctx)
        produced = ctx.step.backward(arguments)
        return None, None, *_by_input(ctx.step, ctx.layouts, ctx.count, produced)


def _distinct(results: list[Tensor]) -> list[Tensor]:
    """The results as different tensors: a loss that is logged too is one value, but has a gradient once."""
    seen: set[int] = set()
    distinct = []
    for result in results:
        distinct.append(result.clone() if id(result) in seen else result)
        seen.add(id(result))
    return distinct


def _without_tangents(step: CompiledStep, everything: list[Tensor]) -> dict[int, Tensor]:
    """Positions among all placeholders -> tensors, where the calling convention leaves tangents out."""
    given = iter(everything)
    inputs = step.partitioned.sharded.inputs
    return {i: next(given) for i, item in enumerate(inputs) if item.kind != "tangent"}


def _differentiable(step: CompiledStep) -> list[int]:
    """Positions of the outputs that have a tangent, in the order of the tangents."""
    outputs = [(item.kind, item.name) for item in step.partitioned.sharded.outputs]
    return [outputs.index(("output", item.name)) for item in step.partitioned.sharded.inputs if item.kind == "tangent"]


def _by_input(
    step: CompiledStep, layouts: Sequence[Layout | None], count: int, produced: Sequence[Tensor]
) -> list[Tensor | None]:
    names = [item.name for item in step.partitioned.sharded.outputs if item.kind == "gradient"]
    by_name = dict(zip(names, produced, strict=True))
    gradients: list[Tensor | None] = []
    given = [item for item in step.partitioned.sharded.inputs if item.kind != "tangent"][:count]
    for item, layout in zip(given, layouts, strict=True):
        gradient = by_name.get(item.name) if item.kind == "parameter" else None
        if gradient is not None and layout is not None:
            gradient = layout.distribute(layout.unpadded(gradient))
        gradients.append(gradient)
    return gradients
