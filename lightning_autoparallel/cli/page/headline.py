"""The figures that a reader looks for first, each on a card with what it counts."""

from __future__ import annotations

import math

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.cli.page.elements import text
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

_UNKNOWN = "not predicted"


def headline(report: PlanReport) -> str:
    """Cards with step time, throughput, exposed share, and memory of one device."""
    cards = (_step_time(report), _throughput(report), _exposed(report), _memory(report))
    return f'<div class="cards">{"".join(cards)}</div>'


def rank_peak_bytes(report: PlanReport) -> int | None:
    """Bytes alive on one rank at most: with optimizer state where something is trained; None if unknown."""
    if "backward" in report.collectives or report.predicted_peak_bytes is None:
        return report.training_peak_bytes
    return report.parameters_bytes + report.predicted_peak_bytes


def _card(name: str, figure: str, said: str, share: float | None = None, unit: str = "") -> str:
    """``share`` of 1 is a full bar."""
    bar = "" if share is None else f'<div class="bar"><i style="width:{100 * min(max(share, 0), 1):.1f}%"></i></div>'
    large = f"<b>{text(figure)} <small>{text(unit)}</small></b>"
    return f'<div class="card"><h3>{text(name)}</h3>{large}{bar}<p>{text(said)}</p></div>'


def _step_time(report: PlanReport) -> str:
    time_us = report.step_time_us
    if time_us is None:
        return _card("Step time", _UNKNOWN, "see below what is missing")
    halves = " + ".join(f"{name} {format_time(report.predictions[name].time_us)}" for name in report.step_graphs)
    whole_us = report.whole_step_us
    around = "optimizer and data not counted" if whole_us is None else f"{format_time(whole_us)} with all around it"
    return _card("Step time", format_time(time_us), f"{halves}; {around}")


def _throughput(report: PlanReport) -> str:
    if not report.step_time_us or not (report.tokens or report.samples):
        return _card("Throughput", _UNKNOWN, "needs a step time and the size of the batch")
    unit, each = ("tokens", report.tokens) if report.tokens else ("samples", report.samples)
    per_second = (each or 0) / report.step_time_us * 1e6
    per_device = per_second / math.prod(report.mesh.values())
    return _card("Throughput", _number(per_second), f"{_number(per_device)} {unit}/s per device", unit=f"{unit}/s")


def _number(value: float) -> str:
    if value >= 1e7:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _exposed(report: PlanReport) -> str:
    if not report.step_time_us:
        return _card("Exposed", _UNKNOWN, "time in which nothing computes")
    exposed_us = sum(report.predictions[name].exposed_us for name in report.step_graphs)
    share = exposed_us / report.step_time_us
    said = f"{format_time(exposed_us)} of the step, in which nothing computes"
    return _card("Exposed", f"{100 * share:.1f} %", said, share)


def _memory(report: PlanReport) -> str:
    peak = rank_peak_bytes(report)
    if peak is None:
        said = f"parameters alone take {format_bytes(report.parameters_bytes)} of each device"
        return _card("Peak memory of a device", _UNKNOWN, said)
    said = "parameters, values and optimizer state" if "backward" in report.collectives else "parameters and values"
    device = report.hardware.get("memory_bytes")
    if not device:
        return _card("Peak memory of a device", format_bytes(peak), said)
    share = peak / device
    said = f"{100 * share:.1f} % of {format_bytes(int(device))}: {said}"
    return _card("Peak memory of a device", format_bytes(peak), said, share)
