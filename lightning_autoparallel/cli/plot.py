"""Predicted memory and timeline as pictures; needs matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from lightning_autoparallel.contracts import GraphPrediction, PlanReport
from lightning_autoparallel.errors import ConfigError

_SIZE_INCHES = (12.0, 4.0)


def check_plots() -> None:
    """Fail before the work rather than after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _figure_class()


def write_plots(report: PlanReport, folder: Path) -> list[Path]:
    """Write ``memory.png`` and ``timeline.png`` of every predicted graph into ``folder``; which files there are.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in (("memory", _draw_memory), ("timeline", _draw_timeline)):
        # A figure of its own, not one of pyplot's: those are global, and choose a window system.
        figure = _figure_class()(figsize=(_SIZE_INCHES[0], _SIZE_INCHES[1] * len(report.predictions)))
        figure.set_layout_engine("constrained")
        panels = figure.subplots(len(report.predictions), 1, squeeze=False)[:, 0]
        for axes, (graph, predicted) in zip(panels, report.predictions.items(), strict=True):
            draw(axes, predicted)
            axes.set_title(f"{report.graph} {graph} on {report.hardware.get('name')} (predicted)")
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def _draw_memory(axes: Any, predicted: GraphPrediction) -> None:
    axes.plot([size / 2**30 for size in predicted.live_bytes], linewidth=1)
    axes.axhline(predicted.peak_memory_bytes / 2**30, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("call, in the order of the graph")
    axes.set_ylabel("GiB alive, parameter shards\nand optimizer state apart")


def _draw_timeline(axes: Any, predicted: GraphPrediction) -> None:
    streams: dict[str, list[tuple[float, float]]] = {"compute": []}
    for event in predicted.events:
        streams.setdefault(event.stream, []).append((event.start_us / 1e3, event.duration_us / 1e3))
    for row, spans in enumerate(streams.values()):
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=f"C{row}", edgecolor="none")
    axes.set_yticks(range(len(streams)), list(streams))
    axes.invert_yaxis()
    axes.set_xlim(0, predicted.time_us / 1e3)
    axes.set_xlabel("milliseconds")


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: pip install 'lightning-autoparallel[plot]'"
        ) from error
