"""What is printed of a rehearsal: measured beside predicted, and what nobody has measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.table import Table

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.cli.rehearse.rehearsal_clock import Rehearsed
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

NOTES = (
    "Measured on this device, as rank 0, with its own shards, kernels, optimizer and data; collectives move nothing,",
    "so losses mean nothing. Memory is that of tensors alive, by the allocator's calls; computing is the median of",
    "steps, the optimizer and all else around them included. The predicted peak takes the optimizer's state as it is.",
    "On a CPU the measured peak lacks what collectives on their way would still read, and tensors that are neither",
    "parameters, buffers nor the optimizer's.",
)
_UNKNOWN = "-"


def rehearsal_table(
    measured: Rehearsed, report: PlanReport, world_size: int, is_this_device: bool, micro_batches: int = 1
) -> Table:
    """Memory and times of one rank, whose optimizer steps by the gradients of so many ``micro_batches``.

    Times are compared where they are predicted for the device that ran.
    """
    mesh = ", ".join(f"{axis}: {size}" for axis, size in report.mesh.items())
    hardware = report.hardware.get("name", "nothing known")
    table = make_table(
        f"Rank 0 of {world_size}, mesh {{{mesh}}}, plan {report.plan}",
        ("",),
        ("measured", f"predicted for {hardware}", "measured / predicted"),
    )
    peak = predicted_peak_bytes(measured, report)
    _bytes_row(table, "parameters", measured.parameters_bytes, report.parameters_bytes)
    _bytes_row(table, "optimizer's state", measured.optimizer_bytes, None)
    _bytes_row(table, "peak memory", measured.peak_bytes, peak)
    computing = computing_us(report, micro_batches)
    ratio = None if computing is None or not is_this_device else measured.median_ms * 1e3 / computing
    table.add_row("computing", format_time(measured.median_ms * 1e3), _time(computing), _ratio(ratio))
    exposed = exposed_us(report, micro_batches)
    table.add_row("exposed communication", _UNKNOWN, _time(exposed), _UNKNOWN)
    if exposed is not None and is_this_device:
        both = format_time(measured.median_ms * 1e3 + exposed)
        table.add_row(f"a step on {world_size} ranks: measured computing, predicted communication", both, _UNKNOWN, "")
    return table


def predicted_peak_bytes(measured: Rehearsed, report: PlanReport) -> int | None:
    """Predicted bytes alive at most, with the state that the optimizer keeps."""
    return replace(report, optimizer_bytes=measured.optimizer_bytes).training_peak_bytes


def computing_us(report: PlanReport, micro_batches: int = 1) -> float | None:
    """Predicted time of an optimizer step in which nothing is waited for; None where a cost is unknown."""
    if report.step_time_us is None:
        return None
    exposed = exposed_us(report, micro_batches) or 0.0
    return report.step_time_us * micro_batches - exposed + (report.around_us or 0.0)


def exposed_us(report: PlanReport, micro_batches: int = 1) -> float | None:
    """Predicted communication of an optimizer step beside which nothing computes; None where a cost is unknown."""
    if report.step_time_us is None:
        return None
    return micro_batches * sum(report.predictions[name].exposed_us for name in report.step_graphs)


def as_json(measured: Rehearsed, report: PlanReport, world_size: int, micro_batches: int = 1) -> dict[str, Any]:
    """Both sides as numbers; bytes and milliseconds."""
    computing, exposed = computing_us(report, micro_batches), exposed_us(report, micro_batches)
    return {
        "world_size": world_size,
        "measured": {
            "parameters_bytes": measured.parameters_bytes,
            "optimizer_bytes": measured.optimizer_bytes,
            "peak_bytes": measured.peak_bytes,
            "step_ms": list(measured.step_ms),
        },
        "predicted": {
            "parameters_bytes": report.parameters_bytes,
            "peak_bytes": predicted_peak_bytes(measured, report),
            "computing_ms": None if computing is None else computing / 1e3,
            "exposed_ms": None if exposed is None else exposed / 1e3,
        },
        "report": report.as_json(),
    }


def _bytes_row(table: Table, name: str, measured: int, predicted: int | None) -> None:
    ratio = measured / predicted if predicted else None
    table.add_row(
        name, format_bytes(measured), _UNKNOWN if predicted is None else format_bytes(predicted), _ratio(ratio)
    )


def _time(time_us: float | None) -> str:
    return _UNKNOWN if time_us is None else format_time(time_us)


def _ratio(ratio: float | None) -> str:
    return _UNKNOWN if ratio is None else f"{ratio:.3f}"
