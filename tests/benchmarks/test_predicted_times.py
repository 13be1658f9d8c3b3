"""Which rows of measured and predicted times are too far apart."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autoparallel.cli.bench.measurements import Measurement
from lightning_autoparallel.cli.bench.processes import MeasurementError
from tests.benchmarks.predicted_times import outside, parse, row_of


def row(measured_ms: float, predicted_ms: float | None) -> list[str]:
    nothing: dict[str, Any] = {"launches": 0.0, "peak_bytes": 0, "startup_s": 0.0, "compile_s": None, "losses": []}
    run = Measurement(step_ms=measured_ms, predicted_ms=predicted_ms, **nothing)
    return row_of(("conv", "ddp"), [run])


@pytest.mark.parametrize(("measured_ms", "is_close"), [(100, True), (110, True), (91, True), (112, False), (89, False)])
def test_a_ratio_is_within_or_named(measured_ms: float, is_close: bool) -> None:
    lines = outside([row(measured_ms, 100.0)], 1.1)
    named = f"conv under ddp: measured / predicted is {measured_ms / 100:.2f}, not within 1.1 either way"
    assert lines == ([] if is_close else [named])


def test_only_rows_that_are_far_are_named() -> None:
    table = [row(100, 100.0), row(300, 100.0), row(100, 50.0)]
    assert len(outside(table, 2.0)) == 1
    assert outside(table, 3.0) == []


def test_what_was_not_compared_is_named() -> None:
    failed = row_of(("conv", "tp"), [MeasurementError("rank 1 failed")])
    assert outside([row(100, None)], 5.0) == ["conv under ddp: nothing to compare"]
    assert outside([failed], 5.0) == ["conv under tp: nothing to compare"]


def test_a_ratio_below_one_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["--within", "0.9"])
    assert "0.9 is less than 1" in capsys.readouterr().err
    assert parse(["--within", "1.15"]).within == 1.15
