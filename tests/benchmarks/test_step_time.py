from __future__ import annotations

import pytest

from tests.benchmarks.step_time import HEADER, OURS, Measurement, compare, parse, show, table


def _run(step_ms: float) -> Measurement:
    return Measurement(step_ms=step_ms, cpu_ms=step_ms / 2, startup_s=1.0, loss=3.0)


def test_a_row_per_contender_with_its_median_range_and_ratio():
    header, ours, theirs = table({OURS: [_run(10), _run(20), _run(90)], "DDP": [_run(30), _run(10), _run(5)]})
    assert header == list(HEADER)
    assert ours == [OURS, "20.0", "10.0..90.0", "1.00", "10.0", "1.00", "1.0", "3.0000"]
    assert theirs == ["DDP", "10.0", "5.0..30.0", "0.50", "5.0", "0.50", "1.0", "3.0000"]


def test_without_ours_there_are_no_ratios():
    assert table({"DDP": [_run(1)]})[1][3] == "-"


def test_columns_are_aligned():
    lines = show(table({OURS: [_run(1)], "DDP": [_run(1000)]})).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_warm_up_that_leaves_no_step_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--steps", "5"])
    assert "leaves none of --steps 5" in capsys.readouterr().err


@pytest.mark.matrix
def test_both_sides_train_alike():
    names = ["autoparallel fsdp interpreted", "Lightning DDP", "Lightning FSDP2"]
    measured = compare(names, parse(["--steps", "3", "--warm-up", "1", "--rounds", "1"]))
    losses = [run.loss for runs in measured.values() for run in runs]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
