"""How a step's own code logs each value, for the moment from which on that code runs itself.

Captured steps log values of the whole batch, as already joined over ranks. Lightning refuses a name that is logged in
another way later in the epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_autoparallel.lightning_compat import Trainer, TrainerFn

ALREADY_GLOBAL = "already the value of the global batch"  # as a group: ``reduce`` over it does nothing
LoggedAs = dict[str, dict[str, Any]]  # by name: what the step's code says of joining over ranks

_ROWS = "batch_size"
_SAYS = ("sync_dist", "sync_dist_group", "rank_zero_only", _ROWS)


def forget_earlier_runs(trainer: Trainer) -> None:
    """A further ``validate`` or ``test`` of one Trainer begins anew: an earlier one has ended as its code logged."""
    if trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING):
        trainer._evaluation_loop._results.clear()


def note_logged(
    logged_as: LoggedAs, log: Callable[..., Any], names: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Keep what a call ``log(*args, **kwargs)`` says of joining and weighing the values of these names."""
    given = inspect.signature(log).bind(*args, **kwargs).arguments
    for name in names:
        logged_as[name] = {key: given[key] for key in _SAYS if key in given}


def as_if_plainly_logged(trainer: Trainer, logged_as: LoggedAs, shards: int, rows: Collection[int]) -> None:
    """From here on the step's own code logs: what it has logged in this epoch is as if it had done so all along.

    Of a sum over whole batches each of the ranks that see different rows keeps its part, ``1 / shards``; so does a mean
    that the step has weighed by their ``rows``, of which its code counts a rank's from here on.
    """
    for result in (trainer._results or {}).values():
        sync = result.meta.sync
        if sync.group is ALREADY_GLOBAL:
            said = logged_as.get(result.meta.name, {})
            result.meta.sync = type(sync)(
                fn=sync.fn,
                _should=said.get("sync_dist", False),
                _group=said.get("sync_dist_group"),
                rank_zero_only=said.get("rank_zero_only", False),
            )
            if result.is_tensor and result.meta.on_epoch and result.meta.is_sum_reduction:
                result.value = result.value / shards
            elif result.is_tensor and result.meta.is_mean_reduction and _counts(said.get(_ROWS), rows):
                result.value, result.cumulated_batch_size = result.value / shards, result.cumulated_batch_size / shards


def _counts(size: Any, rows: Collection[int]) -> bool:
    """Whether a batch size is one of these; a number that a capture follows is no plain one, and is not asked."""
    return type(size) is int and size in rows
