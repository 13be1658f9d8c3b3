"""What measurements say together: medians, ratios, and whether two contenders computed the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.cli.bench.measurements import Contender, Runs
from lightning_autoparallel.cost.sizes import format_bytes

LOSS_TOLERANCE = 1e-3
COMPARED_LOSSES = 10
NONE = "-"
COLUMNS = ("step ms", "min..max", "x ours", "launches", "x ours", "peak memory", "x ours", "start-up s", "compile s")
NOTES = (
    "All measured: medians over rounds. x ours: contender / ours, so above 1 ours needs less. start-up: from the begin",
    "of the fit to the end of the first step, compiling included. launches: collectives that rank 0 starts per batch,",
    "on all process groups; one of them is a few bytes: whether ranks agree (ours), or whether the job is to end",
    "(Lightning's). losses: largest relative difference to ours at first.",
    "Left out of every run: loggers, callbacks, profiler, checkpoints, validation.",
)


def loss_difference(runs: Runs, ours: Runs) -> float:
    """The largest relative difference of one of the first losses between a round of ``runs`` and ours.

    NaN where a loss of only one of them is NaN, or either has none.
    """
    if not runs.measured or not ours.measured:
        return math.nan
    reference = ours.measured[0].losses[:COMPARED_LOSSES]
    differences = [_relative(a, b) for run in runs.measured for a, b in zip(run.losses, reference, strict=False)]
    return max(differences, key=lambda value: (math.isnan(value), value), default=math.nan)


def _relative(loss: float, reference: float) -> float:
    if loss == reference:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference else math.inf


def is_same(runs: Runs, ours: Runs) -> bool:
    """Whether both computed the same: losses within `LOSS_TOLERANCE`, relative."""
    return loss_difference(runs, ours) <= LOSS_TOLERANCE


def ratio(runs: Runs, ours: Runs, what: str) -> float | None:
    """The median of ``runs`` over ours; None without both, or where they did not compute the same."""
    theirs, reference = runs.median(what), ours.median(what)
    return theirs / reference if theirs is not None and reference and is_same(runs, ours) else None


def problems(all_runs: Sequence[Runs], ours: Runs) -> list[str]:
    """One line per contender and thing that went wrong."""
    lines = [f"{runs.contender.name} failed: {first_line(error)}" for runs in all_runs for error in runs.errors]
    if not ours.measured:
        return lines
    return lines + [_different(runs, ours) for runs in all_runs if runs.measured and not is_same(runs, ours)]


def predicted_lines(all_runs: Sequence[Runs]) -> list[str]:
    """A line per contender whose steps were predicted: with rates that were measured, on hardware like this one."""
    return [
        f"{runs.contender.name}: {measured:.1f} ms measured, {predicted:.1f} predicted: {measured / predicted:.2f} x"
        for runs in all_runs
        if (measured := runs.median("step_ms")) and (predicted := runs.median("predicted_ms"))
    ]


def _different(runs: Runs, ours: Runs) -> str:
    return (
        f"{runs.contender.name} did not compute what {ours.contender.name} did: their first losses differ by up to "
        f"{loss_difference(runs, ours):.1e}, relative (at most {LOSS_TOLERANCE:.0e} is rounding), so no ratios are "
        "given. Dropout and other random operators draw differently in each; switch them off to compare"
    )


def first_line(error: str) -> str:
    """The first line of an error's text."""
    return error.strip().split("\n")[0]


def make_rows(all_runs: Sequence[Runs], ours: Runs) -> list[list[str]]:
    """A row of texts per contender, as `COLUMNS` has them."""
    return [[runs.contender.name, *_figures(runs, ours), _verdict(runs, ours)] for runs in all_runs]


def _figures(runs: Runs, ours: Runs) -> list[str]:
    steps = runs.values("step_ms")
    return [
        _shown(runs.median("step_ms"), ".1f"),
        f"{min(steps):.1f}..{max(steps):.1f}" if steps else NONE,
        _shown(ratio(runs, ours, "step_ms"), ".2f"),
        _shown(runs.median("launches"), ".6g"),
        _shown(ratio(runs, ours, "launches"), ".2f"),
        _bytes(runs.median("peak_bytes")),
        _shown(ratio(runs, ours, "peak_bytes"), ".2f"),
        _shown(runs.median("startup_s"), ".1f"),
        _shown(runs.median("compile_s"), ".1f"),
    ]


def _verdict(runs: Runs, ours: Runs) -> str:
    if not runs.measured:
        return "failed"
    if not ours.measured:
        return NONE
    shown = format(loss_difference(runs, ours), ".0e")
    return shown if is_same(runs, ours) else "DIFFERENT"


def _shown(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    return NONE if value is None else format_bytes(round(value))


def comparison(all_runs: Sequence[Runs], ours: Runs) -> Table:
    """The table that is printed."""
    table = make_table("Training, measured", ("contender",), (*COLUMNS, "losses"))
    for row in make_rows(all_runs, ours):
        table.add_row(*row)
    return table


def as_json(all_runs: Sequence[Runs], ours: Runs) -> list[dict[str, Any]]:
    """The same and every measurement behind it."""
    return [
        {
            **_contender(runs.contender),
            "median": {what: runs.median(what) for what in _QUANTITIES},
            "ratio_to_ours": {what: ratio(runs, ours, what) for what in _RATIOS},
            "loss_difference": loss_difference(runs, ours),
            "measured": [vars(run) for run in runs.measured],
            "errors": list(runs.errors),
        }
        for runs in all_runs
    ]


_RATIOS = ("step_ms", "launches", "peak_bytes")
_QUANTITIES = (*_RATIOS, "startup_s", "compile_s", "predicted_ms")


def _contender(contender: Contender) -> dict[str, Any]:
    return {"name": contender.name, "kind": contender.kind, "overrides": dict(contender.overrides)}
