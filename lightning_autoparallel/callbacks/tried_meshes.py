"""The meshes that ``mesh="auto"`` has tried, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.contracts import MeshTrial
from lightning_autoparallel.cost.sizes import format_bytes

TITLE = "Meshes, by predicted time per sample"
TEXTS = ("mesh", "why not")
NUMBERS = ("per sample", "step", "exposed", "memory of a rank", "rows at once", "accumulation")
CAPTION = "per sample: of all ranks together, with the optimizer's part; rows: of all data-parallel ranks"
_LONGEST = 120  # characters of a reason; the report has it whole


def meshes_table(trials: Sequence[MeshTrial]) -> Table:
    """One line for each mesh, the best first."""
    table = make_table(TITLE, TEXTS, NUMBERS, caption=CAPTION)
    for trial in trials:
        table.add_row(*mesh_cells(trial))
    return table


def mesh_cells(trial: MeshTrial) -> tuple[str, ...]:
    """What a line has in ``TEXTS`` and ``NUMBERS``; what is not known stays empty."""
    reason = trial.why_not or ""
    return (
        ", ".join(f"{axis}: {size}" for axis, size in trial.mesh.items()),
        reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}...",
        *(_shown(time_us) for time_us in (trial.us_per_sample, trial.step_time_us, trial.exposed_us)),
        "" if trial.taken_bytes is None else format_bytes(round(trial.taken_bytes)),
        "" if trial.samples is None else f"{trial.samples:,}",
        "" if trial.samples is None else str(trial.accumulation),
    )


def _shown(time_us: float | None) -> str:
    return "" if time_us is None else format_time(time_us)
