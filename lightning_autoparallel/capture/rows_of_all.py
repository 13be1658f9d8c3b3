"""Whether a step does with the rows of all ranks what it does with those of one: where it might not, it runs again.

What each look is for says its own file. A step that needs none, as most do, does not run again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_autoparallel.capture.batch_numbers import check_own_rows, own_rows_read, with_rows_of_all
from lightning_autoparallel.capture.cut_rows import check_cut_rows, may_cut_rows, untold
from lightning_autoparallel.capture.kept_totals import Shown, changes_buffers, check_shown, recorded
from lightning_autoparallel.capture.picked_rows import check_picked_rows
from lightning_autoparallel.capture.picks_in_graph import whole_numbers
from lightning_autoparallel.torch_compat.tracing import JointExport

if TYPE_CHECKING:
    from lightning_autoparallel.capture.step import StepRequest, _Step


def check_as_on_one_rank(
    request: StepRequest, step: _Step, export: JointExport, arguments: tuple[Tensor, ...], twice: tuple[Tensor, ...]
) -> None:
    """Whether rows are found, and what hooks see and the loss are, as they would be on this rank's rows.

    ``arguments`` are fake tensors of the rows of all ranks, ``twice`` of twice as many.

    Raises:
        CaptureError: something would not be, or that cannot be told.
    """
    places = range(len(request.parameters), len(request.parameters) + len(request.buffers))
    reads, rows = step.state.reads, {leaf.shape[0] for leaf in request.layout.tensors if leaf.batched and leaf.shape}
    is_seen = request.seen_by_hooks and (
        step.results > int(step.loss is not None)
        or bool(step.shown())
        or changes_buffers(places, step.state.changed_at, reads)
    )
    picking = whole_numbers(request.layout.tensors, arguments, places.stop, export)
    batch = [
        given for given, leaf in zip(arguments[places.stop :], request.layout.tensors, strict=True) if leaf.batched
    ]
    length = len(batch[0]) if batch else 0
    is_single = length == request.batch_shards
    cuts = length > 0 and may_cut_rows(export.graph_module.graph, length, is_single)
    own = own_rows_read(rows, reads)
    if not (picking or cuts or is_seen or own):
        return
    once = partial(recorded, lambda: _given(step, arguments))
    if own:
        of_once = once()
        check_own_rows(request.name, of_once, with_rows_of_all(own, request.batch_shards, step.state, once), own)
    if not (picking or cuts or is_seen):
        step(*arguments)  # what the step recorded is again that of its own batch
        return
    try:
        of_twice, of_once = recorded(lambda: _given(step, twice)), once()
    except Exception as error:
        step(*arguments)
        if picking or cuts:
            why = f"it does not run on twice its rows ({type(error).__name__}: {error})"
            raise untold(request.name, step.state.entered, why) from error
        if is_seen:
            request.notice(
                f"autoparallel: {request.name} does not run on twice its rows ({type(error).__name__}: {error}): if it "
                "gives sums over rows to hooks, these are sums over the rows of all ranks"
            )
        return
    if picking:
        check_picked_rows(request.name, of_once.entered, of_once.calls, of_twice.calls, picking)
    if cuts:
        check_cut_rows(request.name, of_once.entered, of_once.calls, of_twice.calls, batch, length, is_single)
    if is_seen:
        check_shown(
            request.name, of_once, of_twice, dict(zip(request.buffers, arguments[places.start :], strict=False)), reads
        )


def _given(step: _Step, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, list[Shown], str]:
    results = step(*tensors)
    return step.loss, step.shown(results), step.state.entered
