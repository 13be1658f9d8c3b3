"""Traces and pictures of a predicted step."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from lightning_autoparallel.cli.plot import check_plots, write_plots
from lightning_autoparallel.cli.trace import chrome_trace
from lightning_autoparallel.contracts import GraphPrediction, TimelineEvent
from lightning_autoparallel.errors import ConfigError
from tests.unit._graphs import report_of


def graph(*events: TimelineEvent, time_us: float) -> GraphPrediction:
    return GraphPrediction(
        time_us=time_us,
        compute_us=0.0,
        communication_us=0.0,
        exposed_us=0.0,
        peak_memory_bytes=2048,
        live_bytes=(1024, 2048, 512),
        events=events,
    )


def event(name: str, stream: str, start_us: float, duration_us: float) -> TimelineEvent:
    return TimelineEvent(name=name, stream=stream, start_us=start_us, duration_us=duration_us)


REPORT = report_of(
    graph="training_step",
    hardware={"name": "h100"},
    predictions={
        "forward": graph(event("gather", "dp_shard", 0.0, 5.0), event("mm", "compute", 5.0, 3.0), time_us=8.0),
        "backward": graph(event("mm_1", "compute", 1.0, 2.0), time_us=3.0),
    },
)


def test_a_trace_has_the_backward_after_the_forward_and_a_thread_per_stream():
    trace = chrome_trace(REPORT)
    calls = [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert calls == [
        ("gather", "forward", 1, 0.0, 5.0),
        ("mm", "forward", 0, 5.0, 3.0),
        ("mm_1", "backward", 0, 9.0, 2.0),
    ]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"].endswith("_name")]
    assert names == ["training_step forward and backward, rank 0 (predicted)", "compute", "communication on dp_shard"]
    assert trace["otherData"] == {"figures": "predicted, not measured"}


def test_an_inference_graph_is_a_process_of_its_own():
    inference = graph(event("mm_2", "compute", 0.0, 1.0), time_us=1.0)
    trace = chrome_trace(replace(REPORT, predictions={**REPORT.predictions, "inference": inference}))
    (call,) = [e for e in trace["traceEvents"] if e.get("cat") == "inference"]
    assert (call["pid"], call["ts"]) == (1, 0.0)


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    files = write_plots(REPORT, tmp_path / "plots")
    assert [file.name for file in files] == ["memory.png", "timeline.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    def missing(name, *args):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-autoparallel\[plot\]'"):
        check_plots()
