"""torchmetrics: their values are those of one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torchmetrics
from torch import Tensor, nn
from torchmetrics.utilities import dim_zero_mean

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.mesh import ParallelMesh


class MetricScopes:
    """What the state of each metric covers, told from its updates.

    Updated with this rank's rows, it covers a part, which torchmetrics joins over the data-parallel ranks when it
    computes; other ranks hold the same rows. Updated with values of the whole batch (the loss), it covers everything on
    every rank: joining would count it once per rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._covers_all: dict[int, bool] = {}
        self._not_joined: dict[int, tuple[torchmetrics.Metric, bool, bool]] = {}  # with what they had
        self._of_same_rows: dict[int, nn.Module] = {}  # cover everything because ranks had no rows of their own so far
        self._left_whole: set[int] = set()  # those that covered everything once, and cover rows since

    @contextlib.contextmanager
    def updating(self, metric: nn.Module, covers_all: bool, line: str) -> Iterator[None]:
        """Around an update or forward of ``metric`` at a real step.

        Raises:
            CaptureError: the metric was updated in the other way before.
        """
        self.check([(metric, covers_all, line)])
        self._covers_all[id(metric)] = covers_all
        if covers_all:
            self._of_same_rows.pop(id(metric), None)
        members = _members(metric)
        with contextlib.ExitStack() as stack:
            for member in members:
                if covers_all or self._mesh.data_parallel_size == 1:
                    self._join_nothing(member)
                else:
                    # forward returns the value of the whole batch, not of this rank's rows
                    stack.enter_context(mock.patch.object(member, "dist_sync_on_step", True))
            yield

    def check(self, updates: Iterable[tuple[nn.Module, bool, str]]) -> None:
        """Whether these updates to come, as ``updating`` takes them, go together with each other and with earlier ones.

        Raises:
            CaptureError: they do not.
        """
        updates = list(updates)
        for metric, covers_all, _ in updates:
            if not covers_all:
                self.leave_same_rows(metric)
        known = self._covers_all | dict.fromkeys(self._left_whole, False)
        for metric, covers_all, line in updates:
            if known.setdefault(id(metric), covers_all) != covers_all:
                raise CaptureError(
                    f"{line} updates a {type(metric).__name__} with rows of the batch at one time and with values of "
                    "the whole batch at another: they are counted differently over the ranks; use a metric for each"
                )

    def leave_whole(self, metrics: Iterable[tuple[nn.Module, bool]]) -> None:
        """From here on these are updated with this rank's rows: what they have of whole batches, one rank counts.

        Means over numbers (said of each metric) are kept by all, as each rank has a number of its own from here on.
        """
        for metric, of_numbers in metrics:
            if not self.covers_all(metric):
                continue
            del self._covers_all[id(metric)]
            self._left_whole.add(id(metric))
            for member in _members(metric):
                if id(member) in self._not_joined:
                    _, member.sync_on_compute, member._to_sync = self._not_joined.pop(id(member))
                if not self.counts_common and not (of_numbers and isinstance(member, torchmetrics.MeanMetric)):
                    _empty(member)

    def of_same_rows(self) -> list[nn.Module]:
        """Those that cover everything because ranks had no rows of their own so far."""
        return list(self._of_same_rows.values())

    def leave_same_rows(self, metric: nn.Module) -> None:
        """Rows of each rank's own come to ``metric``: of those that all had, one rank has counted."""
        if self._of_same_rows.pop(id(metric), None) is not None:
            self.leave_whole([(metric, False)])

    def _join_nothing(self, member: torchmetrics.Metric) -> None:
        self._not_joined.setdefault(id(member), (member, member.sync_on_compute, member._to_sync))
        member.sync_on_compute = member._to_sync = False

    def end(self) -> None:
        """Metrics are joined as the user has it: other runs may update them with rows."""
        for member, on_compute, to_sync in self._not_joined.values():
            member.sync_on_compute, member._to_sync = on_compute, to_sync
        self._left_whole.clear()
        self._of_same_rows.clear()

    @property
    def shards(self) -> int:
        """How many ranks see different rows."""
        return self._mesh.data_parallel_size

    @property
    def counts_common(self) -> bool:
        """Whether this rank is the one that counts rows that every rank holds."""
        return self._mesh.data_parallel_rank == 0

    def covers_all(self, metric: nn.Module) -> bool:
        """Whether ``metric`` has been updated with values of the whole batch: every rank counts everything then."""
        return self._covers_all.get(id(metric), False)

    @contextlib.contextmanager
    def updating_with_common(self, metric: nn.Module, some_own: bool, line: str) -> Iterator[None]:
        """Around an update or forward of ``metric`` with rows that every rank holds: one rank counts them.

        Where ranks have no others (not ``some_own``), and had none, each counts all: some metrics cannot join states of
        none.
        """
        with contextlib.ExitStack() as stack:
            if not some_own and id(metric) not in self._left_whole and not self.has_own_rows(metric):
                stack.enter_context(self.updating(metric, True, line))
                self._of_same_rows[id(metric)] = metric
                yield
                return
            if not self.counts_common:
                stack.enter_context(state_kept(metric))
            for member in metric.modules():
                if isinstance(member, torchmetrics.Metric):  # forward's value is of these rows: no rank has others
                    stack.enter_context(mock.patch.object(member, "dist_sync_on_step", False))
            yield

    def has_own_rows(self, metric: nn.Module) -> bool:
        """Whether ``metric`` has been updated with rows that no other rank has."""
        is_updated = any(member._update_count for member in _members(metric))
        return not self._covers_all.get(id(metric), not is_updated)


def _members(metric: nn.Module) -> list[torchmetrics.Metric]:
    """The metric and those in it."""
    return [member for member in metric.modules() if isinstance(member, torchmetrics.Metric)]


def _empty(metric: torchmetrics.Metric) -> None:
    """States that are joined by adding up, or as a list, are as at first; a mean of equal ones stays what it is."""
    metric._computed = None
    for name, default in metric._defaults.items():
        if metric._reductions[name] is dim_zero_mean:
            continue
        empty: Tensor | list[Any] = default.detach().clone().to(metric.device) if isinstance(default, Tensor) else []
        setattr(metric, name, empty)


def outermost_metrics(module: nn.Module) -> list[nn.Module]:
    """Metrics and collections of metrics that the step can call; a collection calls its members itself."""
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    found = [submodule for submodule in module.modules() if isinstance(submodule, kinds)]
    inside = {id(member) for metric in found for member in metric.modules() if member is not metric}
    return [metric for metric in found if id(metric) not in inside]


@contextlib.contextmanager
def state_kept(metric: nn.Module) -> Iterator[None]:
    """After the block the metric has counted nothing of it."""
    members = _members(metric)
    before = [dict(vars(member)) for member in members]
    states = copy.deepcopy([member.metric_state for member in members])  # at once: members may share tensors
    try:
        yield
    finally:
        for member, attributes, state in zip(members, before, states, strict=True):
            vars(member).update({**attributes, **state})
