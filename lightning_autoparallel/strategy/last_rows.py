"""The last rows of an evaluation, which ranks do not share out evenly: what a step does with them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_autoparallel.lightning_compat import (
    Trainer,
    batches_begun,
    current_loader,
    evaluates_one_by_one,
    is_param_in_hook_signature,
    kept_predictions,
    rank_zero_warn,
)
from lightning_autoparallel.lightning_compat.hooks import hooks_where
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.strategy.collected import collects
from lightning_autoparallel.strategy.evaluation_batches import batches_of, share_out_evenly
from lightning_autoparallel.strategy.own_rows import OwnRows, RowDim


@dataclass(frozen=True, kw_only=True)
class RowsOfBatch:
    """Whose rows a batch holds.

    ``common`` ones are held by every rank; ``some_common`` says that its loader has such batches, ``some_own`` that
    it has others. The last ``spare`` of its ``rows`` belong to other ranks; in an evaluation that pads they count as
    the rank's own, as under DDP.
    """

    index: int = 0
    loader: Any = None
    common: bool = False
    some_common: bool = False
    some_own: bool = True
    spare: int = 0
    rows: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the rank has no rows of its own in it, and takes part for the sake of others."""
        return 0 < self.spare == self.rows


def rows_of_this(trainer: Trainer, args: tuple[Any, ...]) -> RowsOfBatch:
    """Whose rows the batch of an evaluation step is; ``args`` are the step's."""
    loader = current_loader(trainer, args[2] if len(args) > 2 else 0)
    batches = batches_of(loader)
    if batches is None:
        return RowsOfBatch()
    index = args[1] if len(args) > 1 else batches_begun(trainer) - 1
    common_from, length = batches.common_from(), len(batches)
    return RowsOfBatch(
        index=index,
        loader=loader,
        common=index >= common_from,
        some_common=common_from < length,
        some_own=common_from > 0,
        spare=batches.spare_rows(index) if trainer.predicting else 0,
        rows=batches.rows(index),
    )


def share_out_rows(loader: DataLoader[Any], trainer: Trainer, control: ControlGroup) -> None:
    """Let a loader of an evaluation hand out each row once, whether ranks can share them out evenly or not.

    Every rank calls it alike; a callback that collects may be of some ranks only.
    """
    (some_collects,) = control.any([not trainer.predicting and collects(trainer)])
    pads, told = partial(_every_rank_needs_its_own, trainer), partial(_tell_repeated, trainer)
    share_out_evenly(loader, pads, told, some_collects)


def _tell_repeated(trainer: Trainer, rows: int) -> None:
    """Predictions are cut to the rank's own rows; what is logged of an evaluation is not."""
    if not trainer.predicting:
        rank_zero_warn(
            f"autoparallel: {rows} row(s) of this evaluation are counted twice: ranks cannot share rows out evenly "
            "where loaders are read at once, a step takes its batches from an iterator, a loader has a batch sampler "
            "of its own, or steps and hooks collect results in attributes; give it a number of rows that divides, "
            "loaders one after another without a sampler, or count by torchmetrics"
        )


def _every_rank_needs_its_own(trainer: Trainer) -> bool:
    """Whether batches that all ranks hold would be taken for those of different rows.

    Predictions are those of the rank's rows. Of several loaders' batches that come together only some may be common,
    and nobody sees which batch a step takes from an iterator.
    """
    step = trainer.lightning_module.test_step if trainer.testing else trainer.lightning_module.validation_step
    takes_iterator = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    return trainer.predicting or takes_iterator or not evaluates_one_by_one(trainer)


@contextlib.contextmanager
def idle_ranks_unseen(trainer: Trainer) -> Iterator[None]:
    """While open, a batch in which a rank has no rows of its own is none for hooks there, nor among its predictions."""

    def runs(hook: str, args: tuple[Any, ...]) -> bool:
        if hook == "on_predict_epoch_end":
            _forget_idle(trainer)
        of_batch = {"on_predict_batch_start": args, "on_predict_batch_end": args[1:]}.get(hook)
        return of_batch is None or not rows_of_this(trainer, of_batch).is_idle

    with hooks_where(runs):
        yield


def _forget_idle(trainer: Trainer) -> None:
    for loader, predictions, indices in kept_predictions(trainer):
        batches, last = batches_of(loader), len(predictions) - 1
        if batches is not None and last >= 0 and 0 < batches.spare_rows(last) == batches.rows(last):
            del predictions[last:], indices[last:]


def without_spare(output: Any, batch: Any, rows: RowsOfBatch, row_dims: RowDim | None = None) -> Any:
    """A prediction for the rank's own rows: without what it holds of the ``spare`` ones, None where all are.

    ``row_dims`` is as ``OwnRows`` takes it. A writer of predictions is told the indices of what is left.
    """
    if not rows.spare:
        return output
    if rows.is_idle:
        _forget_indices(rows)
        return None
    own = OwnRows(rows.rows, rows.spare, batch, row_dims)
    left = own.cut(output)
    if own.are_found or row_dims is not None:
        _forget_indices(rows)
    if own.doubts and row_dims is None:
        warnings.warn(_doubtful(own.doubts[0], rows), stacklevel=2)  # where it is: rank 0 has rows of its own only
    return left


def _forget_indices(rows: RowsOfBatch) -> None:
    indices = getattr(rows.loader.batch_sampler, "seen_batch_indices", None)
    if indices:
        del indices[rows.index][-rows.spare :]


def _doubtful(what: str, rows: RowsOfBatch) -> str:
    return (
        f"autoparallel: predict_step returns {what} for a batch of {rows.rows} rows, of which the last is another "
        "rank's: what it holds of that row cannot be told, and is predicted twice. Return tensors, arrays or lists "
        "with one entry for each row, several of them in a dict, or predict as many rows as ranks can share out"
    )
