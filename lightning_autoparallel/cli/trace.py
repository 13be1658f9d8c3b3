"""The predicted timeline as a Chrome trace: for Perfetto (ui.perfetto.dev) and ``chrome://tracing``."""

from __future__ import annotations

from typing import Any

from lightning_autoparallel.contracts import GraphPrediction, PlanReport

_SHOWN_FIRST = "compute"


def chrome_trace(report: PlanReport) -> dict[str, Any]:
    """One process per step, one thread per stream, the backward after the forward; times in microseconds.

    The format is that of "Trace Event Format" (Google, 2016): complete events (``ph: X``) and names (``ph: M``).
    """
    events: list[dict[str, Any]] = []
    step = {name: report.predictions[name] for name in ("forward", "backward") if name in report.predictions}
    others = {name: predicted for name, predicted in report.predictions.items() if name not in step}
    for process, graphs in enumerate(group for group in (step, others) if group):
        threads = _threads(graphs)
        events += _names(process, f"{report.graph} {' and '.join(graphs)}, rank 0 (predicted)", threads)
        start_us = 0.0
        for name, predicted in graphs.items():
            events += _calls(name, predicted, process, threads, start_us)
            start_us += predicted.time_us
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"figures": "predicted, not measured"}}


def _threads(graphs: dict[str, GraphPrediction]) -> dict[str, int]:
    """Streams to thread numbers, the compute stream first."""
    streams = dict.fromkeys(event.stream for predicted in graphs.values() for event in predicted.events)
    return {stream: number for number, stream in enumerate(sorted(streams, key=lambda s: (s != _SHOWN_FIRST, s)))}


def _names(process: int, title: str, threads: dict[str, int]) -> list[dict[str, Any]]:
    named = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    for stream, number in threads.items():
        label = stream if stream == _SHOWN_FIRST else f"communication on {stream}"
        named.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": label}})
        named.append(
            {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}
        )
    return named


def _calls(
    graph: str, predicted: GraphPrediction, process: int, threads: dict[str, int], start_us: float
) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": event.name,
            "cat": graph,
            "pid": process,
            "tid": threads[event.stream],
            "ts": start_us + event.start_us,
            "dur": event.duration_us,
        }
        for event in predicted.events
    ]
