"""What a training shows: stages that take long, in its progress bar or on a terminal of their own, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import Progress

from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.lightning_compat import Trainer, rank_zero_debug, rank_zero_info
from lightning_autoparallel.pipeline.progress import StageProgress, terminal_display


def training_progress(trainer: Callable[[], Trainer]) -> StageProgress:
    """For a training: shown on rank 0 where the Trainer has a progress bar."""
    return StageProgress(
        is_on=lambda: _has_bar(trainer()),
        display=lambda: _display(trainer()),
        tell=rank_zero_info,
        note=rank_zero_debug,
    )


def planning_progress(options: Mapping[str, Any]) -> StageProgress:
    """For planning in one process, with the ``options`` of the training's Trainer."""
    is_on = options.get("enable_progress_bar") is not False and not options.get("barebones")
    return StageProgress(is_on=lambda: is_on, display=terminal_display, tell=rank_zero_info, note=rank_zero_debug)


def plan_summary(report: PlanReport) -> str:
    """A planned step in one line."""
    mesh = ", ".join(f"{name}: {size}" for name, size in report.mesh.items())
    launches = ", ".join(f"{count} on {axes}" for axes, count in report.launches().items()) or "none"
    peak = report.predicted_peak_bytes
    shown = "" if peak is None else f", predicted peak {peak / 2**30:.2f} GiB"
    return f"autoparallel: mesh {{{mesh}}}, plan {report.plan}, collectives per step: {launches}{shown}"


def _has_bar(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return trainer.is_global_zero and bar is not None and bool(getattr(bar, "is_enabled", True))


def _display(trainer: Trainer) -> Progress | None:
    """The Trainer's own where that is up: two would draw over each other."""
    bar: Any = trainer.progress_bar_callback
    if not hasattr(bar, "progress"):  # tqdm's, or a user's: nobody else can draw beside it
        return None
    shown = bar.progress
    is_up = isinstance(shown, Progress) and shown.live.is_started and shown.console.is_terminal
    return shown if is_up else terminal_display()
