"""Run a CompiledStep under autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.compile.leaf_gradients import give_to_leaves
from lightning_autoparallel.compile.reached import reached_gradients
from lightning_autoparallel.compile.second_order import OF_PARAMETERS, Again, gradients_again
from lightning_autoparallel.contracts import CompiledStep, PlanAxis
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.autograd import release_saved_tensors
from lightning_autoparallel.torch_compat.dtensors import laid_out_like, part_of
from lightning_autoparallel.torch_compat.tracing import active_fake_mode
from lightning_autoparallel.torch_compat.viewable import storage_of


class Layout(Protocol):
    """How a parameter lies on this rank; graphs work on shards padded to the same size everywhere."""

    def padded(self, local: Tensor) -> Tensor: ...
    def unpadded(self, local: Tensor) -> Tensor: ...
    def distribute(self, local: Tensor) -> DTensor: ...


class Backwards(Protocol):
    """Who has ranks agree before a backward: a rank without gradients joins those that have some."""

    def add(self, join: Callable[[tuple[int, ...]], list[tuple[Tensor, Tensor]]]) -> int: ...
    def reach(self, number: int, given: tuple[int, ...], run: Callable[[bool, tuple[int, ...]], Any]) -> Any: ...


def run_step(
    step: CompiledStep,
    inputs: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    again: Again | None = None,
    backwards: Backwards | None = None,
) -> list[Tensor]:
    """The step's outputs that are no gradients, in order; differentiable ones carry a graph to the parameters.

    ``inputs`` are the graph's inputs without constants and tangents, parameters as they are in the module. ``layouts``
    has an entry for each of them, None for what is no sharded parameter. ``again`` computes the results under autograd,
    where their gradients are to be differentiated again. ``backwards`` is asked where some ranks may have none.
    """
    if step.backward is None or not torch.is_grad_enabled():
        everything = [_local(tensor, layout) for tensor, layout in zip(inputs, layouts, strict=True)]
        everything += step.constants
        with _autocast_off(everything):
            return list(step.forward(everything))[: _results(step)]
    return list(_StepFunction.apply(step, layouts, again, backwards, *inputs))  # type: ignore[no-untyped-call]


def forward_again(step: CompiledStep, inputs: Sequence[Tensor], layouts: Sequence[Layout | None]) -> None:
    """Run the forward alone, for its collectives; there are zeros for what has come to lie otherwise since."""
    everything = [_part(tensor).detach() for tensor in inputs] + list(step.constants)
    expected = [node.meta["val"] for node in step.partitioned.forward.graph.find_nodes(op="placeholder")]
    for i, (tensor, like) in enumerate(zip(everything, expected, strict=True)):
        layout = layouts[i] if i < len(layouts) else None
        if layout is not None and tensor.dim() == like.dim():
            tensor = everything[i] = layout.padded(tensor)
        if (tensor.shape, tensor.dtype, tensor.device.type) != (like.shape, like.dtype, like.device.type):
            everything[i] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
    with torch.no_grad(), _autocast_off(everything):
        step.forward(everything)


def _results(step: CompiledStep) -> int:
    return sum(item.kind != "gradient" for item in step.partitioned.sharded.outputs)


def _local(tensor: Tensor, layout: Layout | None) -> Tensor:
    local = _part(tensor).detach()
    return layout.padded(local) if layout is not None else local


def _part(tensor: Tensor) -> Tensor:
    return part_of(tensor) if isinstance(tensor, DTensor) else tensor


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: CompiledStep,
        layouts: Sequence[Layout | None],
        again: Again | None,
        backwards: Backwards | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        everything = [_local(tensor, layout) for tensor, layout in zip(inputs, layouts, strict=True)]
        everything += step.constants
        by_position = _without_tangents(step, everything)
        changed = {item.name for item in step.partitioned.sharded.outputs if item.kind == "buffer"}
        is_part = backwards is not None
        kept = [_kept(step, i, by_position.pop(i), changed, is_part) for i in step.partitioned.saved_inputs]
        by_position.clear()  # the forward empties its list: what is read for the last time there is freed there
        with _autocast_off(everything):
            produced = list(step.forward(everything))
        count = _results(step)
        values = produced[count:]
        results = [_no_view(result, (*kept, *values)) for result in _distinct(produced[:count])]
        ctx.save_for_backward(*kept, *values)
        ctx.step, ctx.layouts = step, layouts
        ctx.again, ctx.inputs = again, () if again is None else inputs
        ctx.set_materialize_grads(False)
        ctx.shapes = [(result.shape, result.dtype, result.device) for result in results]
        differentiable = _differentiable(step)
        ctx.differentiable = differentiable
        ctx.mark_non_differentiable(*(result for i, result in enumerate(results) if i not in differentiable))
        ctx.backwards, ctx.parameters = backwards, [t if isinstance(t, DTensor) else None for t in inputs]
        ctx.number = None if backwards is None else backwards.add(partial(_join, ctx))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and active_fake_mode() is None:
            axes = _check_again(ctx.step, ctx.again)
            return *_NO_TENSORS, *gradients_again(ctx.again, axes, ctx.inputs, ctx.differentiable, gradients)
        given = tuple(i for i, place in enumerate(ctx.differentiable) if gradients[place] is not None)
        if ctx.backwards is None:
            found = _run_backward(ctx, gradients, last=True, given=given)
            return *_NO_TENSORS, *give_to_leaves(ctx, ctx.parameters, found)
        return *_NO_TENSORS, *ctx.backwards.reach(ctx.number, given, partial(_run_backward, ctx, gradients))


_NO_TENSORS = (None,) * 4  # the first arguments of _StepFunction.forward


def _run_backward(
    ctx: Any, gradients: Sequence[Tensor | None], last: bool, given: tuple[int, ...]
) -> list[Tensor | None]:
    """The gradients of a step's inputs; unless it is the ``last`` time, what was saved for it stays.

    Some rank has gradients of the ``given`` results, by their places among those that may have: what only others lead
    to has none.
    """
    tangents = []
    for i in ctx.differentiable:
        shape, dtype, device = ctx.shapes[i]
        gradient = gradients[i]
        tangents.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
    saved = ctx.kept if hasattr(ctx, "kept") else ctx.saved_tensors
    arguments = [*saved, *_laid_out(ctx.step, tangents)]
    if last:
        release_saved_tensors(ctx)
    else:
        ctx.kept = saved  # autograd lets go of its own when the node is done
    del saved
    with _autocast_off(arguments):
        produced = _distinct(list(ctx.step.backward(arguments)))
    found = _by_input(ctx.step, ctx.layouts, ctx.parameters, produced)
    if len(given) == len(ctx.differentiable):
        return found
    reached = reached_gradients(ctx.step.captured, given)
    inputs = [item for item in ctx.step.partitioned.sharded.inputs if item.kind != "tangent"]
    return [g if (item.kind, item.name) in reached else None for item, g in zip(inputs, found, strict=False)]


def _join(ctx: Any, given: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Run the backward for other ranks: this rank's part of the gradients is zero, its shard of their mean is not.

    What the parameters get of it, with the parameters.
    """
    with torch.no_grad():
        found = _run_backward(ctx, [None] * len(ctx.shapes), last=False, given=given)
        pairs = zip(ctx.parameters, found, strict=True)
    return [(p, g) for p, g in pairs if p is not None and g is not None and p.requires_grad]


_SMALL = 65536  # elements of a buffer


def _kept(step: CompiledStep, position: int, tensor: Tensor, changed: set[str], is_part: bool) -> Tensor:
    """What the backward reads of an input: of a buffer that the step changes, its value before.

    Where the graph is a part of a step, other parts may change it, as batch norm does in its other mode.
    """
    item = step.partitioned.sharded.inputs[position]
    if item.kind != "buffer":
        return tensor
    changes = item.name in changed or (is_part and tensor.is_floating_point() and tensor.numel() <= _SMALL)
    return tensor.clone() if changes else tensor


def _autocast_off(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """The casts of a step are in its graph: a caller's autocast would add its own between."""
    kind = next((tensor.device.type for tensor in tensors), "cpu")
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


_DRAWS = (
    ", and it draws random numbers, so that it cannot be run again: leave the module uncaptured, by "
    "capture={'forward': [...]} with the names of those that may be captured, [] for none"
)


def _check_again(step: CompiledStep, again: Again | None) -> Sequence[PlanAxis]:
    if again is None or step.has_random_ops:
        raise CaptureError(
            f"the gradient of {step.captured.name} is to be differentiated again (create_graph=True), but its backward "
            f"is a fixed graph{_DRAWS if again is not None else ': ' + OF_PARAMETERS}"
        )
    return step.partitioned.sharded.axes


def _laid_out(step: CompiledStep, tangents: list[Tensor]) -> list[Tensor]:
    """``tangents`` with the strides that the backward was made for; those that autograd hands over may be others."""
    if not any(tangent.dim() for tangent in tangents):
        return tangents
    backward = step.partitioned.backward
    assert backward is not None
    nodes = list(backward.graph.find_nodes(op="placeholder"))[-len(tangents) :]
    return [laid_out_like(node.meta["val"], tangent) for node, tangent in zip(nodes, tangents, strict=True)]


def _distinct(results: list[Tensor]) -> list[Tensor]:
    """The results as different tensors: a loss that is logged too is one value, but has a gradient once."""
    seen: set[int] = set()
    distinct = []
    for result in results:
        distinct.append(result.clone() if id(result) in seen else result)
        seen.add(id(result))
    return distinct


_FEW = 1024  # elements: a copy takes less time than to look whose memory it is


def _no_view(result: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """The result as a tensor that may be changed in place: of its own, unless its memory is ``saved``, else a copy.

    Autograd refuses to change views that a function of its has made.
    """
    if not result._is_view() or active_fake_mode() is not None:
        return result
    if result.numel() <= _FEW:
        return result.clone()
    if storage_of(result) in map(storage_of, saved):
        return result.clone()
    alone = result.new_empty(0)
    return alone.set_(result.untyped_storage(), result.storage_offset(), result.size(), result.stride())  # type: ignore[call-overload,no-any-return]


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
    step: CompiledStep,
    layouts: Sequence[Layout | None],
    parameters: Sequence[DTensor | None],
    produced: Sequence[Tensor],
) -> list[Tensor | None]:
    """Gradients of the step's inputs, None where there is none; those of parameters as they lie in ``parameters``."""
    names = [(item.of, item.name) for item in step.partitioned.sharded.outputs if item.kind == "gradient"]
    by_name = dict(zip(names, produced, strict=True))
    gradients: list[Tensor | None] = []
    given = [item for item in step.partitioned.sharded.inputs if item.kind != "tangent"][: len(parameters)]
    for item, layout, parameter in zip(given, layouts, parameters, strict=True):
        gradient = by_name.get((item.kind, item.name))
        if gradient is not None and layout is not None:
            gradient = layout.distribute(laid_out_as(parameter, layout.unpadded(gradient)))
        gradients.append(gradient)
    return gradients


def laid_out_as(parameter: Tensor | None, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient with the strides of its part of the parameter, as autograd has it.

    A DTensor's own strides say nothing of its part's. Fused optimizers read both by one index: on a GPU they refuse
    others, on a CPU they update other elements without a word. Parts of other shapes wait for their reduction, whose
    graph takes contiguous ones.
    """
    if isinstance(parameter, DTensor) and (own := part_of(parameter)).shape == gradient.shape:
        return laid_out_like(own, gradient)
    return gradient.contiguous()
