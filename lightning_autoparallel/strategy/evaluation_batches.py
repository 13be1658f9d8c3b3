"""Batches of an evaluation over several ranks: every row once, and as many batches on every rank."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_autoparallel.lightning_compat import batch_samplers_that_keep_indices, injected_samplers

_MOST_COMMON = 4  # times a rank's rows of a batch, where those are several: what every rank evaluates at once


class EvaluationBatches(Sampler[list[int]]):
    """One rank's batches of indices: its rows of each global batch, which is that of one device.

    What the ranks cannot share out evenly comes last. It is *common*: every rank holds all of it, or, where
    ``pads()`` says so, each rank holds its part, filled up with rows of the others. Where a module ``collects`` rows by
    itself, no more than one row is common.

    Args:
        sampler: what Lightning shares rows out with; it says in which order they come, and to how many ranks they go.
        rows: of one rank's batch.
        drop_last: whether what does not fill a batch is left out.
        pads: asked when batches are made.
        repeated: told, when they are read, how many rows two ranks hold.
        collects: whether common rows cannot be counted once.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        rows: int,
        drop_last: bool,
        pads: Callable[[], bool],
        repeated: Callable[[int], None] = lambda rows: None,
        collects: bool = False,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, rows, drop_last
        self._pads, self._repeated, self._collects = pads, repeated, collects

    def __len__(self) -> int:
        return self._full + len(self._last(range(self._full * self._global_rows, len(self._whole()))))

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self._whole())
        rest = len(order) % self._global_rows
        if self._fills(rest) and not self.drop_last and (filled := -rest % self.sampler.num_replicas):
            self._repeated(filled)
        stops = range(self._global_rows, self._full * self._global_rows + 1, self._global_rows)
        full = (self._own(order[stop - self._global_rows : stop]) for stop in stops)
        return itertools.chain(full, self._last(order[self._full * self._global_rows :]))

    def common_from(self) -> int:
        """The index of the first batch that every rank holds; the number of batches where there is none."""
        rest = len(self._whole()) % self._global_rows
        return self._full + sum(not common for _, common in self._parts(rest))

    def spare_rows(self, index: int) -> int:
        """How many rows of this rank's batch are other ranks' too, and come last in it."""
        rest = len(self._whole()) - index * self._global_rows
        if rest >= self._global_rows or not self._fills(rest):
            return 0
        own = len(range(self.sampler.rank, rest, self.sampler.num_replicas))
        return self.rows(index) - own

    def rows(self, index: int) -> int:
        """How many rows each rank's batch has, spare ones among them, unless it is common."""
        rest = len(self._whole()) - index * self._global_rows
        return min(self.batch_size, -(-rest // self.sampler.num_replicas))

    @property
    def _global_rows(self) -> int:
        return self.batch_size * self.sampler.num_replicas

    @property
    def _full(self) -> int:
        return len(self._whole()) // self._global_rows

    def _fills(self, rest: int) -> bool:
        """Whether the last rows are shared out with some twice; one alone is collected no more often on every rank."""
        return self._pads() or (self._collects and rest % self.sampler.num_replicas > 1)

    def _whole(self) -> DistributedSampler[Any]:
        """The order of all rows, as the sampler of one single rank has it."""
        whole = copy.copy(self.sampler)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(whole.dataset)  # type: ignore[arg-type]
        return whole

    def _parts(self, rest: int) -> list[tuple[int, bool]]:
        """How many of the last rows come in each batch, and whether it is common."""
        ranks, most = self.sampler.num_replicas, 1 if self.batch_size == 1 else _MOST_COMMON * self.batch_size
        if self.drop_last or rest == 0:
            return []
        if rest % ranks == 0 or self._fills(rest):
            return [(rest, False)]
        # where there is nothing else, too, every rank has rows of its own: metrics cannot join states of none
        at_once = rest <= most and self._full and not self._collects
        even = 0 if at_once else rest - rest % ranks
        common = [(min(most, rest - start), True) for start in range(even, rest, most)]
        return [(even, False), *common] if even else common

    def _last(self, order: Any) -> list[list[int]]:
        batches, start = [], 0
        for rows, common in self._parts(len(order)):
            part = list(order[start : start + rows])
            batches.append(part if common else self._own(part))
            start += rows
        return batches

    def _own(self, rows: list[int]) -> list[int]:
        """This rank's rows, as many as any rank's."""
        rank, ranks = self.sampler.rank, self.sampler.num_replicas
        filled = [*rows, *itertools.islice(itertools.cycle(rows), -len(rows) % ranks)]
        return filled[rank::ranks]


class _Items(Sampler[int]):
    """The same where a loader makes no batches: each item is one."""

    def __init__(self, batches: EvaluationBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[int]:
        return (index for (index,) in self.batches)


def share_out_evenly(
    loader: DataLoader[Any], pads: Callable[[], bool], repeated: Callable[[int], None], collects: bool = False
) -> None:
    """Let a loader that Lightning shares out over ranks hand out each row once.

    Loaders with samplers or batch samplers of the user's own that keep rows to ranks are left as they are. ``repeated``
    is told how many rows two ranks will hold, if any.
    """
    batch_sampler = loader.batch_sampler
    keeps_indices = isinstance(batch_sampler, batch_samplers_that_keep_indices())
    inner = batch_sampler._batch_sampler if keeps_indices else batch_sampler  # type: ignore[union-attr]
    if inner is not None and type(inner) is not BatchSampler:
        if filled := _filled(getattr(inner, "sampler", None)):
            repeated(filled)
        return
    sampler = loader.sampler if inner is None else inner.sampler
    if not isinstance(sampler, DistributedSampler) or type(sampler) not in injected_samplers():
        return
    if sampler.num_replicas == 1 or sampler.drop_last:
        return
    if inner is None:
        # a DataLoader lets nobody set its samplers; made again, it would lose what else it holds
        vars(loader)["sampler"] = _Items(EvaluationBatches(sampler, 1, False, pads, repeated, collects))
        return
    batches = EvaluationBatches(sampler, inner.batch_size, inner.drop_last, pads, repeated, collects)
    if keeps_indices:
        batch_sampler._batch_sampler = batches  # type: ignore[union-attr]
    else:
        vars(loader)["batch_sampler"] = batches


def _filled(sampler: Any) -> int:
    """How many rows a sampler repeats so that all ranks have as many."""
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    return max(0, sampler.num_samples * sampler.num_replicas - len(sampler.dataset))  # type: ignore[arg-type]


def batches_of(loader: Any) -> EvaluationBatches | None:
    """How the rows of ``loader`` are shared out, if it is by us."""
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        found = getattr(sampler, "_batch_sampler", getattr(sampler, "batches", sampler))
        if isinstance(found, EvaluationBatches):
            return found
    return None
