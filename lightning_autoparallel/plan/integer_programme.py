"""The planner's problem as a mixed-integer programme, solved by HiGHS.

What is left when x may be any share is mostly solved by whole ones, and in less time: it is asked first. Where it is
not, most choices are whole all the same. Those stay, and what is left of the others is as good mostly, to the gap.
Where it is not, what was found so settles others by `probing.py`, before HiGHS branches on the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import highspy
import numpy as np

from lightning_autoparallel.errors import InfeasiblePlanError, SearchTimeError
from lightning_autoparallel.plan.probing import settle
from lightning_autoparallel.plan.problem import Problem
from lightning_autoparallel.plan.programme import WHOLE, Programme

_TO_SETTLE = 0.5  # of the time that is left
GAP = 1e-3  # of the objective, to the bound that is proved


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One alternative for each choice; ``bound_us`` is what no other can be below.

    ``is_for_room`` where a faster one takes more memory than there is.
    """

    taken: tuple[int, ...]
    time_us: float
    bound_us: float
    seconds: float
    columns: int
    rows: int
    is_for_room: bool = False


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    start: tuple[int, ...] | None = None,
    gap: float = GAP,
    most_rounds: int | None = None,
    most_us: float = math.inf,
) -> Solution:
    """The best alternatives, to a relative ``gap`` or as good as ``time_limit_s`` allows.

    Args:
        start: alternatives to begin with.
        most_rounds: of the solver's cuts and nodes; unlike seconds they end at the same plan on a busy machine.
        most_us: of no interest is what takes longer, which ends early, but may be found all the same.

    Raises:
        InfeasiblePlanError: nothing goes together, or not even shares in ``most_us``.
        SearchTimeError: the limit has come before anything was found.
    """
    programme = Programme(problem)
    highs = highspy.Highs()
    for name, value in {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": gap,
        "time_limit": time_limit_s,
        "random_seed": 0,
    }.items():
        highs.setOptionValue(name, value)
    highs.passModel(programme.model())
    end = time.monotonic() + time_limit_s
    taken, bound_us = _best(highs, programme, problem, start, gap, most_rounds, most_us, end)
    return Solution(
        taken=taken,
        time_us=problem.time_us(taken),
        bound_us=bound_us,
        seconds=highs.getRunTime(),  # of all that was run
        columns=len(programme.costs),
        rows=len(programme.rows),
    )


def _best(
    highs: highspy.Highs,
    programme: Programme,
    problem: Problem,
    start: tuple[int, ...] | None,
    gap: float,
    most_rounds: int | None,
    most_us: float,
    end: float,
) -> tuple[tuple[int, ...], float]:
    """The alternatives, and a bound of what any take; at ``end``, by the monotonic clock, what there is then."""
    bound_us, values = _relaxed(highs, problem, most_us), _values(highs)
    _leave(highs, end)
    if bound_us is None:
        return _whole(highs, programme, problem, start, most_rounds)
    if programme.is_whole(values):
        return programme.taken(values), bound_us
    good_us = min(bound_us * (1 + gap), most_us)
    # Settling takes no rounds: where few are allowed, what is not that good is of no use.
    within_us = most_us if most_rounds is None else good_us
    known = _of_whole_ones(highs, programme, values, within_us, most_rounds)
    _leave(highs, end)
    if known is None:
        return _whole(highs, programme, problem, start, most_rounds)
    if problem.time_us(known) <= good_us:
        return known, bound_us
    if start is not None and problem.fits(start):
        known = min(known, start, key=problem.time_us)
    settle(highs, programme, problem.time_us(known), gap, _left_s(end) * _TO_SETTLE)
    _leave(highs, end)
    with contextlib.suppress(InfeasiblePlanError):  # nothing better in time
        taken, proved_us = _whole(highs, programme, problem, known, most_rounds)
        return min(taken, known, key=problem.time_us), max(bound_us, proved_us)
    return known, bound_us


def _left_s(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def _leave(highs: highspy.Highs, end: float) -> None:
    """Give the next search what time is left: each has the limit for itself."""
    highs.setOptionValue("time_limit", _left_s(end))


def _values(highs: highspy.Highs) -> np.ndarray:
    return np.asarray(highs.getSolution().col_value)


def _relaxed(highs: highspy.Highs, problem: Problem, most_us: float) -> float | None:
    """Solve for shares of alternatives: the objective, None where that has not ended in time.

    Raises:
        InfeasiblePlanError: not even shares go together, or in ``most_us``.
    """
    # Presolving takes longer than the simplex method on what is there.
    highs.setOptionValue("solve_relaxation", True)
    highs.setOptionValue("presolve", "off")
    highs.setOptionValue("objective_bound", most_us)
    highs.run()
    status = highs.getModelStatus()
    highs.setOptionValue("solve_relaxation", False)
    highs.setOptionValue("presolve", "choose")
    highs.setOptionValue("objective_bound", math.inf)
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
        _check_feasible(highs, problem)
    return highs.getInfo().objective_function_value if status == highspy.HighsModelStatus.kOptimal else None


def _of_whole_ones(
    highs: highspy.Highs, programme: Programme, shares: np.ndarray, most_us: float, most_rounds: int | None
) -> tuple[int, ...] | None:
    """The best where choices that ``shares`` have whole stay as they are; None where that takes over ``most_us``."""
    columns = np.flatnonzero(programme.are_whole & (shares > 1 - WHOLE)).astype(np.int32)
    ones = np.ones(len(columns))
    highs.changeColsBounds(len(columns), columns, ones, ones)
    highs.clearSolver()
    highs.setOptionValue("objective_bound", most_us)  # it ends where nothing is that good
    with _interrupted(highs, most_rounds):
        highs.run()
    info = highs.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    taken = programme.taken(_values(highs)) if found and info.objective_function_value <= most_us else None
    highs.setOptionValue("objective_bound", math.inf)
    highs.changeColsBounds(len(columns), columns, np.zeros(len(columns)), ones)
    return taken


def _whole(
    highs: highspy.Highs,
    programme: Programme,
    problem: Problem,
    start: tuple[int, ...] | None,
    most_rounds: int | None,
) -> tuple[tuple[int, ...], float]:
    """The best of whole alternatives, and a bound of what any take.

    Raises:
        InfeasiblePlanError: nothing was found.
    """
    highs.clearSolver()  # shares are no solution to begin with: trying them takes rounds
    if start is not None:
        highs.setSolution(programme.solution_of(start))
    with _interrupted(highs, most_rounds):
        highs.run()
    _check_feasible(highs, problem)
    return programme.taken(_values(highs)), highs.getInfo().mip_dual_bound


def _check_feasible(highs: highspy.Highs, problem: Problem) -> None:
    """Whether anything was found.

    Raises:
        InfeasiblePlanError: nothing was; a SearchTimeError where its time was up.
    """
    if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        is_over = highs.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
        raise (SearchTimeError if is_over else InfeasiblePlanError)(
            f"no plan was found for {len(problem.choices)} choices: HiGHS says "
            f"{highs.modelStatusToString(highs.getModelStatus())!r} after {highs.getRunTime():.1f} s"
        )


@contextlib.contextmanager
def _interrupted(highs: highspy.Highs, most_rounds: int | None) -> Iterator[None]:
    """The solver stops where it asks for the ``most_rounds``-th time whether to go on."""
    if most_rounds is None:
        yield
        return
    rounds = itertools.count(1)

    def ask(event: highspy.HighsCallbackEvent) -> None:
        if next(rounds) >= most_rounds:
            event.interrupt()

    highs.cbMipInterrupt.subscribe(ask)
    try:
        yield
    finally:
        highs.cbMipInterrupt.unsubscribe(ask)
