"""Plans for the room that a rank has: the fastest that fits, of equally fast ones the leanest, and why none fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.integer_programme import Solution, solve
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter, Lying
from lightning_autoparallel.plan.problem import Problem, priced, unlimited

_AS_FAST = 1.002  # times the best
_PRICE = 0.02  # of the best plan's time, for all the room that there is
_LEANER_LIMIT_S = 20.0
_MOST_SHOWN = 3
_DEAR = 20.0  # the same where memory counts more than time
_LEAST_LIMIT_S = 20.0


def check_room(free: Mapping[fx.Node, FreeParameter], room_bytes: float) -> None:
    """Whether parameters fit however they lie.

    Raises:
        InfeasiblePlanError: they do not.
    """
    ways = {p.name: min(p.ways, key=lambda way: way.size_bytes) for p in free.values()}
    least = {name: way.size_bytes for name, way in ways.items()}
    if (total := sum(least.values())) <= room_bytes:
        return
    gathered = sum(way.gathered_bytes for way in ways.values())
    stays = f", and {gathered / 2**30:.3g} GiB of it stays gathered (reshard_after_forward)" if gathered else ""
    fixed = gathered + sum(ways[p.name].size_bytes for p in free.values() if _is_kept_whole(p, ways[p.name]))
    more = ""
    if room_bytes > fixed:
        times = math.ceil((total - fixed) / (room_bytes - fixed))
        more = f"{times} times more ranks on dp_shard would hold them, or "
    kinds: Counter[str] = Counter()
    for name, size in least.items():
        kinds[fxn.kind_of(name)] += int(size)
    most = ", ".join(f"{kind} {size / 2**30:.3g}" for kind, size in kinds.most_common(_MOST_SHOWN))
    raise InfeasiblePlanError(
        f"no plan fits: parameters, their gradients and the optimizer's state take at least {total / 2**30:.3g} GiB "
        f"on a rank, shared out over all that divide them, and there is room for {room_bytes / 2**30:.3g} (most take "
        f"{most}{stays}): {more}a larger memory_budget_gib"
    )


def _is_kept_whole(parameter: FreeParameter, leanest: Lying) -> bool:
    """Whether it lies whole though it could be cut: what would be gathered of it takes more."""
    return not leanest.stored and any(way.stored for way in parameter.ways)


def best_that_fits(problem: Problem) -> Solution:
    """The fastest, or where none fits the one of least memory: what is saved is known only once passes have rewritten.

    Limits are reckoned with only where the fastest of all passes one, as most do not.

    Raises:
        InfeasiblePlanError: none goes together; a SearchTimeError where none was found in time.
    """
    solution = solve(replace(problem, limits=()))
    if problem.fits(solution.taken):
        return solution
    dear = priced(problem, _DEAR * solution.time_us / stays_bytes(problem, solution.taken))
    try:
        least = solve(unlimited(dear), _LEAST_LIMIT_S, start=solution.taken)
    except InfeasiblePlanError:  # its time was up
        least = solution
    try:
        fastest = solve(problem, start=least.taken if problem.fits(least.taken) else None)
    except InfeasiblePlanError:
        fastest = replace(least, time_us=problem.time_us(least.taken), bound_us=solution.bound_us)
    return replace(fastest, is_for_room=True)


def leaner(problem: Problem, solution: Solution) -> tuple[int, ...]:
    """A plan that is as fast as the solution and takes less of the room, or the solution's own.

    That is not asked of one that is there because it takes less than faster ones: the room decided.
    """
    taken, time_us = solution.taken, solution.time_us
    room_bytes = sum(limit.most_bytes for limit in problem.limits)
    if solution.is_for_room or math.isinf(room_bytes) or not room_bytes:
        return taken
    try:
        other = solve(priced(problem, _PRICE * time_us / room_bytes), _LEANER_LIMIT_S, start=taken).taken
    except InfeasiblePlanError:  # its time was up, or the solution itself does not fit
        return taken
    is_as_fast = problem.time_us(other) <= time_us * _AS_FAST and problem.fits(other)
    return other if is_as_fast and stays_bytes(problem, other) < stays_bytes(problem, taken) else taken


def stays_bytes(problem: Problem, taken: tuple[int, ...]) -> float:
    """What stays on a rank through a step, and passes through it at most."""
    return sum(limit.size_bytes(taken) for limit in problem.limits)
