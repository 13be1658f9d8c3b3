"""Launches of training steps, predicted beside measured: what each step was to launch, and what it did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rich.table import Table

from lightning_autoparallel.callbacks.tables import make_table

_ROWS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class StepLaunches:
    """Training steps in a row that were planned alike and launched alike; counts by mesh axes, on one rank.

    Steps are numbered from 0 at the start of a fit. ``predicted`` is counted in the final graphs of the captured
    variant that ran.
    """

    first: int
    last: int
    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    def by_axes(self) -> Iterator[tuple[str, int, int]]:
        """Mesh axes, predicted and measured launches, of every group that either knows."""
        for axes in {**self.predicted, **self.measured}:
            yield axes, self.predicted.get(axes, 0), self.measured.get(axes, 0)

    def differing(self) -> dict[str, str]:
        """For every group whose counts differ what to say of it."""
        return {
            axes: f"{axes}: {measured} measured, {predicted} predicted"
            for axes, predicted, measured in self.by_axes()
            if measured != predicted
        }


@dataclass
class LaunchHistory:
    """The steps of a fit so far, equal ones in a row as one; only the last rows are kept, ``steps`` counts all."""

    steps: int = 0
    rows: deque[StepLaunches] = field(default_factory=lambda: deque(maxlen=_ROWS_SHOWN))

    def add(self, predicted: Mapping[str, int], measured: Mapping[str, int]) -> StepLaunches:
        """Append one step, and return it alone."""
        step = StepLaunches(first=self.steps, last=self.steps, predicted=dict(predicted), measured=dict(measured))
        self.steps += 1
        before = self.rows[-1] if self.rows else None
        if before is not None and (before.predicted, before.measured) == (step.predicted, step.measured):
            self.rows[-1] = replace(before, last=step.last)
        else:
            self.rows.append(step)
        return step


def steps_table(history: LaunchHistory) -> Table:
    """Predicted beside measured launches, step by step and group by group."""
    first = history.rows[0].first if history.rows else 0
    table = make_table(
        "Launches of the training steps on one rank, step by step",
        ("steps", "axes"),
        ("predicted", "measured", "difference"),
        caption=f"steps 0 to {first - 1} are not shown" if first else None,
    )
    for row in history.rows:
        steps = str(row.first) if row.first == row.last else f"{row.first} to {row.last}"
        for axes, predicted, measured in row.by_axes():
            difference = f"{measured - predicted:+d}" if measured != predicted else ""
            table.add_row(steps, axes, str(predicted), str(measured), difference)
    return table
