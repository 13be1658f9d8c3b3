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
from lightning_autoparallel.compile.wiring import Wiring, detached_where_given, distinct, own_part
from lightning_autoparallel.contracts import CompiledStep, PlanAxis
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.autograd import release_saved_tensors
from lightning_autoparallel.torch_compat.dtensors import laid_out_like
from lightning_autoparallel.torch_compat.tracing import active_fake_mode
from lightning_autoparallel.torch_compat.viewable import storage_of


class Backwards(Protocol):
    """Who has ranks agree before a backward: a rank without gradients joins those that have some."""

    def add(self, join: Callable[[tuple[int, ...]], list[tuple[Tensor, Tensor]]]) -> int: ...
    def reach(self, number: int, given: tuple[int, ...], run: Callable[[bool, tuple[int, ...]], Any]) -> Any: ...


def run_step(
    step: CompiledStep,
    inputs: Sequence[Tensor],
    wiring: Wiring,
    again: Again | None = None,
    backwards: Backwards | None = None,
) -> list[Tensor]:
    """The step's outputs that are no gradients, in order; differentiable ones carry a graph to the parameters.

    ``inputs`` are the graph's inputs without constants and tangents, parameters as they are in the module. ``wiring``
    is that of the step. ``again`` computes the results under autograd, where their gradients are to be differentiated
    again. ``backwards`` is asked where some ranks may have none.
    """
    if step.backward is None or not torch.is_grad_enabled():
        everything = [*wiring.parts(inputs), *step.constants]
        given = set(map(id, everything))
        with _autocast_off(everything):
            return detached_where_given(list(step.forward(everything))[: wiring.results], given)
    return list(_StepFunction.apply(step, wiring, again, backwards, *inputs))  # type: ignore[no-untyped-call]


def forward_again(step: CompiledStep, inputs: Sequence[Tensor], wiring: Wiring) -> None:
    """Run the forward alone, for its collectives; there are zeros for what has come to lie otherwise since."""
    everything = [own_part(tensor) for tensor in inputs] + list(step.constants)
    expected = [node.meta["val"] for node in step.partitioned.forward.graph.find_nodes(op="placeholder")]
    for i, (tensor, like) in enumerate(zip(everything, expected, strict=True)):
        layout = wiring.layouts[i] if i < len(wiring.layouts) else None
        if layout is not None and tensor.dim() == like.dim():
            tensor = everything[i] = layout.padded(tensor)
        if (tensor.shape, tensor.dtype, tensor.device.type) != (like.shape, like.dtype, like.device.type):
            everything[i] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
    with torch.no_grad(), _autocast_off(everything):
        step.forward(everything)


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: CompiledStep,
        wiring: Wiring,
        again: Again | None,
        backwards: Backwards | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        everything = [*wiring.parts(inputs), *step.constants]
        given, is_part = set(map(id, everything)), backwards is not None
        saved = [item.kept(everything[item.place], is_part) for item in wiring.saved]
        with _autocast_off(everything):  # the forward empties its list: what is read for the last time is freed there
            produced = list(step.forward(everything))
        saved += produced[wiring.results :]
        results = distinct(detached_where_given(produced[: wiring.results], given))
        results = [_no_view(result, saved) for result in results]
        ctx.save_for_backward(*saved)
        ctx.step, ctx.wiring = step, wiring
        ctx.again, ctx.inputs = again, () if again is None else inputs
        ctx.set_materialize_grads(False)
        ctx.shapes = [(result.shape, result.dtype, result.device) for result in results]
        ctx.mark_non_differentiable(*(result for i, result in enumerate(results) if i not in wiring.differentiable))
        ctx.backwards, ctx.parameters = backwards, [t if isinstance(t, DTensor) else None for t in inputs]
        ctx.number = None if backwards is None else backwards.add(partial(_join, ctx))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        differentiable = ctx.wiring.differentiable
        if torch.is_grad_enabled() and active_fake_mode() is None:
            axes = _check_again(ctx.step, ctx.again)
            return *_NO_TENSORS, *gradients_again(ctx.again, axes, ctx.inputs, differentiable, gradients)
        given = tuple(i for i, place in enumerate(differentiable) if gradients[place] is not None)
        if ctx.backwards is None:
            found = _run_backward(ctx, gradients, last=True, given=given)
            return *_NO_TENSORS, *give_to_leaves(ctx, ctx.wiring.gradients, ctx.parameters, found)
        return *_NO_TENSORS, *ctx.backwards.reach(ctx.number, given, partial(_run_backward, ctx, gradients))


_NO_TENSORS = (None,) * 4  # the first arguments of _StepFunction.forward


def _run_backward(
    ctx: Any, gradients: Sequence[Tensor | None], last: bool, given: tuple[int, ...]
) -> list[Tensor | None]:
    """The gradients of a step's inputs; unless it is the ``last`` time, what was saved for it stays.

    Some rank has gradients of the ``given`` results, by their places among those that may have: what only others lead
    to has none.
    """
    wiring: Wiring = ctx.wiring
    tangents = []
    for i in wiring.differentiable:
        shape, dtype, device = ctx.shapes[i]
        gradient = gradients[i]
        tangents.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
    saved = ctx.kept if hasattr(ctx, "kept") else ctx.saved_tensors
    arguments = [*saved, *_laid_out(wiring, tangents)]
    if last:
        release_saved_tensors(ctx)
    else:
        ctx.kept = saved  # autograd lets go of its own when the node is done
    del saved
    with _autocast_off(arguments):
        produced = distinct(list(ctx.step.backward(arguments)))
    found = wiring.by_input(ctx.parameters, produced)
    if len(given) == len(wiring.differentiable):
        return found
    reached = reached_gradients(ctx.step.captured, given)
    return [g if (item.kind, item.name) in reached else None for item, g in zip(wiring.inputs, found, strict=True)]


def _join(ctx: Any, given: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Run the backward for other ranks: this rank's part of the gradients is zero, its shard of their mean is not.

    What the parameters get of it, with the parameters.
    """
    with torch.no_grad():
        found = _run_backward(ctx, [None] * len(ctx.shapes), last=False, given=given)
        pairs = zip(ctx.parameters, found, strict=True)
    return [(p, g) for p, g in pairs if p is not None and g is not None and p.requires_grad]


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


def _laid_out(wiring: Wiring, tangents: list[Tensor]) -> list[Tensor]:
    """``tangents`` with the strides that the backward was made for; those that autograd hands over may be others."""
    if not any(tangent.dim() for tangent in tangents):
        return tangents
    return [laid_out_like(expected, tangent) for expected, tangent in zip(wiring.tangents, tangents, strict=True)]


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
