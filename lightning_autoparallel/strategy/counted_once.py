"""What a step logs and what metrics count of the last rows of an evaluation, which every rank holds: once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.lightning_compat import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    extract_batch_size,
)
from lightning_autoparallel.strategy.last_rows import RowsOfBatch
from lightning_autoparallel.strategy.metrics import MetricScopes, outermost_metrics

_DEPTH = 4  # of containers in which metrics are looked for: attributes, and what these hold


def weigh_rows(trainer: Trainer, shards: int) -> None:
    """Let what is logged of the current batch, and of no other size, weigh as the rows of all ``shards`` together.

    Lightning weighs by this rank's rows, which are of another share of the batch where every rank holds all of it.
    """
    results = trainer._results
    if results is None or results.batch is None:
        return
    # Lightning asks only where a mean over the epoch needs it, and says what is wrong then.
    with contextlib.suppress(MisconfigurationException):
        results.batch_size = shards * extract_batch_size(results.batch)


def as_counted(
    log: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowsOfBatch, scopes: MetricScopes
) -> inspect.BoundArguments:
    """The arguments of a call of ``log``, or of ``log_dict``, changed so that, joined over ranks, each row counts once.

    Lightning joins weights as whole numbers: those of all ranks together must be a multiple of the ranks.
    """
    bound = inspect.signature(log).bind(*args, **kwargs)
    given = bound.arguments
    if not rows.common:
        if given.get("batch_size") is not None:
            given["batch_size"] *= scopes.shards
        return bound
    reduction = given.get("reduce_fx", "mean")
    sums = getattr(reduction, "__name__", reduction) == "sum"
    if sums and given.get("sync_dist", False) and not scopes.counts_common:
        name = "value" if "value" in given else "dictionary"
        given[name] = _nothing(given[name])
    return bound


def _nothing(value: Any) -> Any:
    if isinstance(value, (Tensor, int, float)):
        return value * 0
    if isinstance(value, dict):
        return {name: _nothing(item) for name, item in value.items()}
    return value


@contextlib.contextmanager
def counting_once(module: LightningModule, rows: RowsOfBatch, scopes: MetricScopes) -> Iterator[None]:
    """Around what runs as it is written, on a batch of these ``rows``: a step, or the hooks behind any step."""
    if not rows.some_common:
        with _own_rows_coming(scopes):
            yield
        return
    weigh_rows(module.trainer, 1 if rows.common else scopes.shards)
    with contextlib.ExitStack() as stack:
        if not rows.common:
            stack.enter_context(_own_rows_coming(scopes))
        for name in ("log", "log_dict"):
            counted = counted_log(getattr(module, name), rows, scopes)
            stack.enter_context(mock.patch.object(module, name, counted))
        for metric in _metrics_at_hand(module) if rows.common else ():
            for name in ("update", "forward"):
                counted_call = _counted_call(metric, getattr(metric, name), rows, scopes)
                stack.enter_context(mock.patch.object(metric, name, counted_call))
        yield


@contextlib.contextmanager
def _own_rows_coming(scopes: MetricScopes) -> Iterator[None]:
    """Where a metric that has only met rows of all ranks is updated, it meets a rank's own."""

    def leaving(metric: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            scopes.leave_same_rows(metric)
            return call(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for metric in scopes.of_same_rows():
            for name in ("update", "forward"):
                stack.enter_context(mock.patch.object(metric, name, leaving(metric, getattr(metric, name))))
        yield


def _metrics_at_hand(module: LightningModule) -> list[nn.Module]:
    """The metrics of a module and of callbacks, also those in attributes that torch does not know."""
    holders = [*module.modules(), *module.trainer.callbacks]  # type: ignore[attr-defined]
    modules = [found for holder in holders for found in _modules_in(vars(holder), _DEPTH)]
    return list({id(metric): metric for metric in outermost_metrics(nn.ModuleList(modules))}.values())


def _modules_in(value: Any, depth: int) -> Iterator[nn.Module]:
    """Those that containers hold, ``depth`` of them in each other: some hold themselves."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(part, depth - 1)


def counted_log(log: Callable[..., None], rows: RowsOfBatch, scopes: MetricScopes) -> Callable[..., None]:
    """``log``, or ``log_dict``, of a rank's own batch or of a common one."""

    def run(*args: Any, **kwargs: Any) -> None:
        bound = as_counted(log, args, kwargs, rows, scopes)
        log(*bound.args, **bound.kwargs)

    return run


def _counted_call(
    metric: nn.Module, call: Callable[..., Any], rows: RowsOfBatch, scopes: MetricScopes
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with scopes.updating_with_common(metric, rows.some_own, user_line()):
            return call(*args, **kwargs)

    return run
