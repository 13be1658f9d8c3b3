from __future__ import annotations

import pytest

from tests.benchmarks.step_time import Measurement
from tests.benchmarks.tensor_parallel import INTERPRETED, OURS, THEIRS, compare, lines, parse


def _run(step_ms: float, losses: list[float]) -> Measurement:
    return Measurement(step_ms=step_ms, cpu_ms=1.0, startup_s=1.0, loss=losses[-1], losses=losses)


def test_medians_ratios_and_the_largest_difference_of_losses():
    ours = [_run(10, [2.0, 1.0]), _run(30, [2.0, 1.1]), _run(20, [2.0, 1.0])]
    first, second = lines({OURS: ours, THEIRS: [_run(40, [2.0, 1.0])]})
    assert first == f"{OURS}: 20.0 ms a step, 0.50 times {THEIRS}, losses within 1.0e-01"
    assert second == f"{THEIRS}: 40.0 ms a step, 1.00 times {THEIRS}, losses within 0.0e+00"


def test_other_losses_are_refused(monkeypatch):
    runs = {OURS: _run(1, [2.0, 1.0]), THEIRS: _run(1, [2.0, 1.00003])}
    monkeypatch.setattr("tests.benchmarks.tensor_parallel.measure", lambda name, *_, **__: runs[name])
    with pytest.raises(AssertionError, match=r"autoparallel rules: losses differ by 3.0e-05"):
        compare(list(runs), parse([]))


@pytest.mark.matrix
def test_rules_train_like_hand_written_tensor_parallelism():
    measured = compare([INTERPRETED, THEIRS], parse(["--steps", "20", "--warm-up", "1"]))
    assert all(len(run.losses) == 20 for runs in measured.values() for run in runs)
