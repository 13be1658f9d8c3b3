"""The meshes that ``mesh="auto"`` has tried, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.contracts import MeshTrial
from lightning_autoparallel.cost.sizes import format_bytes

_LONGEST = 120  # characters of a reason; the report has it whole


def meshes_table(trials: Sequence[MeshTrial]) -> Table:
    """One line for each mesh, the best first."""
    table = make_table(
        "Meshes, by predicted time per sample",
        ("mesh", "why not"),
        ("per sample", "step", "exposed", "memory of a rank", "rows at once", "accumulation"),
        caption="per sample: of all ranks together, with the optimizer's part; rows: of all data-parallel ranks",
    )
    for trial in trials:
        reason = trial.why_not or ""
        table.add_row(
            ", ".join(f"{axis}: {size}" for axis, size in trial.mesh.items()),
            reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}...",
            *(_shown(time_us) for time_us in (trial.us_per_sample, trial.step_time_us, trial.exposed_us)),
            "" if trial.taken_bytes is None else format_bytes(round(trial.taken_bytes)),
            "" if trial.samples is None else f"{trial.samples:,}",
            "" if trial.samples is None else str(trial.accumulation),
        )
    return table


def _shown(time_us: float | None) -> str:
    return "" if time_us is None else format_time(time_us)
