"""Predicted times and memory as tables and sentences; every one of them says that it is predicted, and from what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.contracts import LARGEST_SHOWN, CollectiveTable, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

_NOT_COUNTED = "not counted: the optimizer, clipping, reading data, further micro-batches of an accumulation"


def format_time(time_us: float) -> str:
    """``1536.0`` -> ``"1.54 ms"``."""
    if time_us < 1e3:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.3f} s"


def times_table(report: PlanReport) -> Table:
    """Time and peak memory of each graph."""
    table = make_table(
        f"Time and memory of one step on one rank (predicted for {report.hardware.get('name')})",
        ("graph",),
        ("time", "computing", "communicating", "exposed", "peak memory"),
        caption="exposed: nothing computes; peak memory: all that is alive but parameter shards and optimizer state",
    )
    for graph, predicted in report.predictions.items():
        times = (predicted.time_us, predicted.compute_us, predicted.communication_us, predicted.exposed_us)
        table.add_row(graph, *map(format_time, times), format_bytes(predicted.peak_memory_bytes))
    return table


def largest_table(report: PlanReport) -> Table:
    """The largest values alive at each graph's peak."""
    title = f"The {LARGEST_SHOWN} largest values alive at the peak (predicted)"
    table = make_table(title, ("graph", "value", "kind", "module"), ("size",))
    for graph, predicted in report.predictions.items():
        for share in predicted.at_peak[:LARGEST_SHOWN]:
            table.add_row(graph, share.name, share.kind, share.module, format_bytes(share.size_bytes))
    return table


def passes_table(report: PlanReport) -> Table:
    """What every pass did, by launches of each kind."""
    table = make_table(
        "Passes, in the order they ran (collectives predicted)",
        ("pass", "graph", "collectives that changed"),
        ("nodes", "collectives", "time"),
    )
    for done in report.passes:
        nodes = f"{done.nodes_before} -> {done.nodes_after}"
        counts = f"{_count(done.before)} -> {_count(done.after)}"
        table.add_row(done.name, done.graph, _changes(done.before, done.after), nodes, counts, f"{done.seconds:.2f} s")
    return table


def decomposition_lines(report: PlanReport) -> list[str]:
    """What was said of every collective beside a matrix product: whether it is sent in parts, and why not."""
    return [
        f"{done.name} ({done.graph}, predicted): {note}"
        for done in report.passes
        if done.name.startswith("decompose_")
        for note in done.notes
    ]


def predicted_lines(report: PlanReport) -> list[str]:
    """The step's time and throughput, and what was assumed; empty where nothing is predicted."""
    time_us = report.step_time_us
    if time_us is None:
        return []
    exposed_us = sum(report.predictions[name].exposed_us for name in report.step_graphs)
    halves = "forward and backward" if "backward" in report.predictions else "one graph"
    lines = [
        f"predicted step ({halves}): {format_time(time_us)}, of it exposed communication {format_time(exposed_us)} "
        f"({100 * exposed_us / time_us:.1f} %); {_NOT_COUNTED}"
    ]
    if report.samples:
        samples = report.samples / math.prod(report.mesh.values()) / time_us * 1e6
        tokens = report.tokens_per_second_per_device
        shown = "" if tokens is None else f"{tokens:,.0f} tokens, "
        lines.append(f"predicted throughput per second and device: {shown}{samples:,.4g} samples")
    return [*lines, *_memory_line(report), f"assumed: {_assumptions(report.hardware)}"]


def _memory_line(report: PlanReport) -> list[str]:
    """What a training step needs, with the optimizer; nothing where nothing is trained."""
    alive = report.training_peak_bytes
    if alive is None or "backward" not in report.predictions:
        return []
    keeps = "two values per parameter for an optimizer" if report.optimizer_bytes is None else "the optimizer's state"
    line = f"predicted memory of one rank: at most {format_bytes(alive)} alive, with parameters and {keeps}"
    share = report.hardware.get("reserved_share")
    return [line if share is None else f"{line}; {format_bytes(round(alive * (1 + share)))} reserved"]


def _assumptions(hardware: Mapping[str, Any]) -> str:
    inside, between = hardware["intra_node"], hardware["inter_node"]
    if hardware.get("is_measured"):
        return f"{hardware['name']}, by `lightning-autoparallel calibrate`"
    return (
        f"{hardware['name']}, of its datasheet's peak {100 * hardware['matmul_fraction']:.0f} % in matrix products, "
        f"{100 * hardware['attention_fraction']:.0f} % in attention and {100 * hardware['memory_fraction']:.0f} % of "
        f"memory bandwidth; per rank {inside['bandwidth_gb_per_s']:g} GB/s inside of a node of "
        f"{hardware['ranks_per_node']}, {between['bandwidth_gb_per_s']:g} GB/s between nodes"
    )


def _changes(before: CollectiveTable, after: CollectiveTable) -> str:
    """``all_gather 290 -> 98``, for each kind of which the launches changed."""
    kinds = sorted({*before, *after})
    counts = ((kind, _launches(before.get(kind, {})), _launches(after.get(kind, {}))) for kind in kinds)
    return ", ".join(f"{kind} {old} -> {new}" for kind, old, new in counts if old != new)


def _launches(per_axes: Mapping[str, Any]) -> int:
    return sum(counted.count for counted in per_axes.values())


def _count(table: CollectiveTable) -> int:
    return sum(_launches(per_axes) for per_axes in table.values())
