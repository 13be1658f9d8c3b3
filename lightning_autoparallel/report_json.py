"""Parts of a plan's report as numbers, strings, lists and mappings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_autoparallel.contracts import CollectiveTable, GraphPrediction, ModuleReport, PassReport

LARGEST_SHOWN = 5  # of what is alive at a predicted peak


def table_json(table: CollectiveTable) -> dict[str, dict[str, dict[str, int]]]:
    """Launches and bytes, by kind and axes."""
    return {
        kind: {axes: {"count": one.count, "bytes": one.size_bytes} for axes, one in sorted(per_axes.items())}
        for kind, per_axes in sorted(table.items())
    }


def module_json(module: ModuleReport) -> dict[str, Any]:
    """What one module saves and launches."""
    collectives: Mapping[str, CollectiveTable] = module.collectives
    return {
        "path": module.path,
        "saved_bytes": module.saved_bytes,
        "collectives": {graph: table_json(table) for graph, table in collectives.items()},
    }


def prediction_json(predicted: GraphPrediction | None) -> dict[str, Any]:
    """The figures of one graph; without its events and its curve, which have files of their own."""
    if predicted is None:
        return {}
    figures = ("time_us", "compute_us", "communication_us", "exposed_us", "peak_memory_bytes")
    return {name: getattr(predicted, name) for name in figures} | {
        "largest_at_peak": [asdict(share) for share in predicted.at_peak[:LARGEST_SHOWN]]
    }


def pass_json(done: PassReport) -> dict[str, Any]:
    """What one pass has changed."""
    return asdict(done) | {"before": table_json(done.before), "after": table_json(done.after)}
