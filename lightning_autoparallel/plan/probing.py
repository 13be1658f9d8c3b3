"""Choices that are settled before the solver branches, as every other alternative is proved to take longer.

A combination that is known bounds the best one. A choice that is not whole in the relaxed programme mostly takes one
alternative by far: where the relaxed programme without that alternative takes longer than the known combination, the
best takes it (probing, of mixed-integer programming: Savelsbergh, ORSA Journal on Computing 6, 1994). With what is
settled so the relaxed programme takes more time, and settles others. HiGHS adds cuts instead, of which such programmes
need hundreds: of `plan --config llama3/debug --world-size 8 --strategy.mesh '{dp_shard: 4, tp: 2}' --strategy.hardware
cpu` the programme in which everything that is gathered stays so took 25 s of CPU time, 6 with this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import highspy
import numpy as np

from lightning_autoparallel.plan.programme import WHOLE, Programme

_BY_ROUNDING = 1e-6  # of the known time: by less is nothing proved to take longer


def settle(highs: highspy.Highs, programme: Programme, known_us: float, gap: float, time_limit_s: float) -> int:
    """Fix alternatives in ``highs`` that every combination in less than ``known_us`` takes; how many were fixed.

    It ends where the relaxed programme is whole, within ``gap`` of what is known, or settles nothing more.
    """
    fixed, end = 0, time.monotonic() + time_limit_s
    with _relaxed(highs):
        highs.setOptionValue("time_limit", highs.getRunTime() + time_limit_s)  # which for this counts from the first
        while True:
            bound_us, values = _solved(highs), np.asarray(highs.getSolution().col_value)
            if bound_us is None or bound_us >= known_us * (1 - gap) or programme.is_whole(values):
                return fixed
            leading = _leading(programme, values)
            settled = sum(time.monotonic() < end and _is_settled(highs, column, known_us) for column in leading)
            if not settled:
                return fixed
            fixed += settled


def _leading(programme: Programme, values: np.ndarray) -> list[int]:
    """Of each choice that is not whole the column with the largest share."""
    leading = [max(columns.values(), key=lambda column: values[column]) for columns in programme.alternatives]
    return [column for column in leading if values[column] < 1 - WHOLE]


def _is_settled(highs: highspy.Highs, column: int, known_us: float) -> bool:
    """Whether nothing without it takes less than is known; it is 1 from then on."""
    highs.changeColBounds(column, 0.0, 0.0)
    bound_us = _solved(highs)
    is_needed = bound_us is not None and bound_us > known_us * (1 + _BY_ROUNDING)
    highs.changeColBounds(column, float(is_needed), 1.0)
    return is_needed


def _solved(highs: highspy.Highs) -> float | None:
    """The relaxed programme's objective, infinite where nothing goes together; None where it has not ended in time."""
    highs.run()
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return float("inf")
    return highs.getInfo().objective_function_value if status == highspy.HighsModelStatus.kOptimal else None


@contextmanager
def _relaxed(highs: highspy.Highs) -> Iterator[None]:
    """Alternatives may be taken in shares; each run begins with where the one before it ended."""
    highs.setOptionValue("solve_relaxation", True)
    highs.setOptionValue("presolve", "off")
    try:
        yield
    finally:
        highs.setOptionValue("solve_relaxation", False)
        highs.setOptionValue("presolve", "choose")
