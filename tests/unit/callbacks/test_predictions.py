"""Predicted figures as users read them: labelled, with units, and what was assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autoparallel.callbacks.predictions import (
    decomposition_lines,
    format_time,
    largest_table,
    passes_table,
    predicted_lines,
    times_table,
)
from lightning_autoparallel.callbacks.tables import render_table
from lightning_autoparallel.contracts import GraphPrediction, MemoryShare
from lightning_autoparallel.cost import hardware_named


def prediction(time_us: float, exposed_us: float, peak: int = 2**30) -> GraphPrediction:
    return GraphPrediction(
        time_us=time_us,
        compute_us=time_us - exposed_us,
        communication_us=700.0,
        exposed_us=exposed_us,
        peak_memory_bytes=peak,
        at_peak=tuple(
            MemoryShare(name=f"value_{i}", size_bytes=2**20 * (9 - i), kind="saved", module="layers.0")
            for i in range(7)
        ),
    )


@pytest.fixture
def report(training_report):
    """A step of 20 ms on 8 devices, of 16 sequences of 1000 tokens."""
    return replace(
        training_report,
        hardware=hardware_named("h100").as_json(),
        predictions={"forward": prediction(8e3, 500.0), "backward": prediction(12e3, 1500.0)},
        samples=16,
        tokens=16_000,
    )


def lines_of(table):
    return [" ".join(line.split()) for line in render_table(table).splitlines()]


@pytest.mark.parametrize(("time_us", "shown"), [(12.34, "12.3 us"), (1536.0, "1.54 ms"), (2.5e6, "2.500 s")])
def test_times_carry_their_unit(time_us, shown):
    assert format_time(time_us) == shown


def test_the_step_and_its_throughput(report):
    step, throughput, assumed = predicted_lines(report)
    assert step.startswith(
        "predicted step (forward and backward): 20.00 ms, of it exposed communication 2.00 ms (10.0 %); not counted: "
        "the optimizer"
    )
    # 2000 tokens and 2 samples per device in 20 ms
    assert throughput == "predicted throughput per second and device: 100,000 tokens, 100 samples"
    assert "h100, of its datasheet's peak 65 % in matrix products" in assumed
    assert "42 GB/s between nodes" in assumed
    assert report.as_json()["tokens_per_second_per_device"] == pytest.approx(100_000)


def test_the_memory_of_training(report):
    report = replace(report, parameters_bytes=2**20, predicted_peak_bytes=5 * 2**20)
    line = next(line for line in predicted_lines(report) if "memory" in line)
    assert line == (
        "predicted memory of one rank: at most 8.0 MiB alive, with parameters and two values per parameter for an "
        "optimizer"
    )
    reserved = replace(report, hardware={**report.hardware, "reserved_share": 0.125}, optimizer_bytes=2**20)
    line = next(line for line in predicted_lines(reserved) if "memory" in line)
    assert line.endswith("at most 7.0 MiB alive, with parameters and the optimizer's state; 7.9 MiB reserved")
    assert reserved.as_json()["training_peak_bytes"] == 7 * 2**20
    inference = replace(report, predictions={}, predicted_peak_bytes=None)
    assert inference.training_peak_bytes is None


def test_nothing_is_said_where_a_graph_has_no_prediction(report):
    report = replace(report, predictions={"forward": prediction(8e3, 500.0)})
    assert predicted_lines(report) == []
    assert report.as_json()["step_time_us"] is None
    assert "time_us" not in report.as_json()["backward"]


def test_the_tables(report):
    times = lines_of(times_table(report))
    assert times[0] == "Time and memory of one step on one rank (predicted for h100)"
    assert "forward 8.00 ms 7.50 ms 700.0 us 500.0 us 1.0 GiB" in times
    largest = [line for line in lines_of(largest_table(report)) if line.startswith("backward")]
    assert largest[0] == "backward value_0 saved layers.0 9.0 MiB"
    assert len(largest) == 5
    assert "merge_identical_collectives training_step all_gather 5 -> 2 90 -> 87 5 -> 2 0.25 s" in lines_of(
        passes_table(report)
    )


def test_the_json_has_the_figures_of_each_graph(report):
    backward = report.as_json()["backward"]
    figures = {"time_us": 12e3, "compute_us": 10.5e3, "communication_us": 700.0, "exposed_us": 1500.0}
    assert {name: backward[name] for name in figures} == figures
    assert backward["peak_memory_bytes"] == 2**30
    assert [share["name"] for share in backward["largest_at_peak"]] == [f"value_{i}" for i in range(5)]
    assert report.as_json()["hardware"]["matmul_fraction"] == 0.65


def test_what_is_sent_in_parts_is_said_with_its_pass(report):
    done = replace(report.passes[0], name="decompose_gather_matmul", graph="step.forward", notes=("one", "another"))
    shown = decomposition_lines(replace(report, passes=(*report.passes, done)))
    assert shown == [f"decompose_gather_matmul (step.forward, predicted): {note}" for note in done.notes]
