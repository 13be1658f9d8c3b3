"""What a captured step may change: buffers, and the batch in a copy; what it may differentiate: parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_autoparallel.capture.state import StepState
from lightning_autoparallel.capture.watch import NeedsClones
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tracing import JointExport

if TYPE_CHECKING:
    from lightning_autoparallel.capture.step import StepRequest


def check_outputs(request: StepRequest, export: JointExport, state: StepState) -> None:
    """What the graph changes besides buffers, or differentiates besides parameters.

    Raises:
        CaptureError: it changes a parameter, or differentiates a batch leaf.
        NeedsClones: it changes leaves of the batch, in copies of which it may.
    """
    parameters = list(request.parameters)
    first = len(parameters) + len(request.buffers)
    outputs = [output for output in export.outputs if output is not None]
    for kind, position in outputs:
        if kind == "mutation" and position < len(parameters):
            raise changes_input(request, position, line_of(state, position))
        if kind == "gradient" and position >= first:
            raise CaptureError(
                f"{request.name} asks for the gradient of batch leaf '{request.layout.tensors[position - first].path}' "
                "(requires_grad_): a captured step has those of parameters only"
            )
    changed = frozenset(position - first for kind, position in outputs if kind == "mutation" and position >= first)
    for position in sorted(changed & request.layout.sharing):
        raise CaptureError(
            f"{line_of(state, first + position)}: {request.name} changes '{request.layout.tensors[position].path}' in "
            "place, and another tensor that it is given shares its memory: change a copy of it"
        )
    if changed:
        raise NeedsClones(changed)


def changes_input(request: StepRequest, position: int, line: str) -> CaptureError:
    """The error for a step that changes what only the optimizer does, or what is differentiated."""
    parameters, buffers = list(request.parameters), list(request.buffers)
    if position < len(parameters):
        what, remedy = f"parameter {parameters[position]} in place", "only the optimizer may; keep it as a buffer"
    elif position < len(parameters) + len(buffers):
        what = f"buffer {buffers[position - len(parameters)]} to a value that carries a gradient"
        remedy = "write value.detach()"
    else:
        leaf = request.layout.tensors[position - len(parameters) - len(buffers)]
        what, remedy = f"batch leaf '{leaf.path}' to a value that carries a gradient", "change a copy of it"
    return CaptureError(f"{line}: {request.name} changes the {what}: {remedy}")


def line_of(state: StepState | None, position: int) -> str:
    """The user's line that changed the input at a position."""
    return "?" if state is None else state.changed_at.get(position, state.entered)
