"""The last rows of an evaluation, which ranks do not share out evenly: what a step does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autoparallel.lightning_compat import (
    Trainer,
    batches_begun,
    current_loader,
    evaluates_one_by_one,
    is_param_in_hook_signature,
)
from lightning_autoparallel.strategy.evaluation_batches import batches_of
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map


@dataclass(frozen=True, kw_only=True)
class RowsOfBatch:
    """Whose rows a batch holds.

    ``common`` ones are held by every rank; ``some_common`` says that its loader has such batches, ``some_own`` that
    it has others. The last ``spare`` rows of the batch belong to other ranks.
    """

    index: int = 0
    loader: Any = None
    common: bool = False
    some_common: bool = False
    some_own: bool = True
    spare: int = 0


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
        spare=batches.spare_rows(index),
    )


def every_rank_needs_its_own(trainer: Trainer) -> bool:
    """Whether batches that all ranks hold would be taken for those of different rows.

    Predictions are those of the rank's rows. Of several loaders' batches that come together only some may be common,
    and nobody sees which batch a step takes from an iterator.
    """
    step = trainer.lightning_module.test_step if trainer.testing else trainer.lightning_module.validation_step
    takes_iterator = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    return trainer.predicting or takes_iterator or not evaluates_one_by_one(trainer)


RowDim = Callable[[Tensor], int | None]


def without_spare(output: Any, batch: Any, rows: RowsOfBatch, row_dim: RowDim) -> Any:
    """A prediction for the rank's own rows: without what it holds of the ``spare`` ones.

    ``row_dim`` says of a tensor of the output in which dim it has the rows of the batch, if it has them. Lists of the
    batch, of names for example, that are returned as they are have them, too. An item that is a batch by itself and
    another rank's gives None.
    """
    if not rows.spare:
        return output
    if rows.loader.batch_sampler is None:
        return None
    indices = getattr(rows.loader.batch_sampler, "seen_batch_indices", None)
    if indices:
        del indices[rows.index][-rows.spare :]
    lists = _lists(batch)

    def is_leaf(part: Any) -> bool:
        return isinstance(part, list) and part in lists

    def own(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return leaf[: -rows.spare]
        dim = row_dim(leaf) if isinstance(leaf, Tensor) else None
        return leaf if dim is None else leaf.narrow(dim, 0, leaf.shape[dim] - rows.spare)

    return tree_map(own, output, is_leaf=is_leaf)


def _lists(batch: Any) -> list[list[Any]]:
    """The lists of strings or numbers in a batch: one for each row."""
    found: list[list[Any]] = []

    def is_row_list(part: Any) -> bool:
        if isinstance(part, list) and part and all(isinstance(item, (str, int, float)) for item in part):
            found.append(part)
            return True
        return False

    tree_flatten(batch, is_leaf=is_row_list)
    return found
