"""What another alternative would cost: the problem solved again with that one fixed, or what rules it out.

A solution is the best to a gap, so one with another alternative fixed may even be a little better; it says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.plan.integer_programme import solve
from lightning_autoparallel.plan.problem import Fixed, Problem, Value, restricted

MOST_SOLVES = 40
_GAP = 1e-7  # differences of single alternatives are far below the planner's own gap
_TIME_LIMIT_S = 10.0
_PROVED_US = 0.05


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The best with an alternative fixed: ``taken`` and how much it takes more; or None, and ``ruled_out`` by what.

    Where it is not ``proved``, the time limit came first: it takes at most that much more.
    """

    taken: tuple[int, ...] | None = None
    more_us: float = math.inf
    ruled_out: str = ""
    proved: bool = True


class OtherSolutions:
    """Of a solved problem; ``asked`` counts what was solved again, at most ``most_solves`` times."""

    def __init__(self, problem: Problem, taken: Sequence[int], most_solves: int = MOST_SOLVES) -> None:
        self._problem, self._time_us = problem, problem.time_us(taken)
        self._most_solves = most_solves
        self.asked = 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is solved."""
        return self.asked >= self._most_solves

    def ruled_out(self, fixed: Fixed) -> str:
        """What forbids it whatever else is taken, as far as one look tells; empty where nothing does."""
        return next(self._reasons(fixed), "")

    def with_fixed(self, fixed: Fixed) -> WhatIf | None:
        """The best that leaves only these alternatives to these choices; None where no more is solved."""
        if reason := self.ruled_out(fixed):
            return WhatIf(ruled_out=reason)
        if self.is_spent:
            return None
        self.asked += 1
        problem = restricted(self._problem, fixed)
        try:
            best = solve(problem, _TIME_LIMIT_S, gap=_GAP)
        except InfeasiblePlanError:
            return WhatIf(ruled_out=self._together(problem))
        proved = best.time_us - best.bound_us <= max(_PROVED_US, 2 * _GAP * best.time_us)
        return WhatIf(taken=best.taken, more_us=best.time_us - self._time_us, proved=proved)

    def _together(self, problem: Problem) -> str:
        """Why nothing goes together with it: the limits, where without them something does."""
        names = ", ".join(limit.name for limit in problem.limits)
        if names and not self.is_spent:
            self.asked += 1
            try:
                solve(dataclasses.replace(problem, limits=()), _TIME_LIMIT_S)
            except InfeasiblePlanError:
                return "nothing leads on from it, through calls further on"
            return f"limit: {names}, with what calls need beside it"
        return "nothing that calls further on take goes together with it"

    def _reasons(self, fixed: Fixed) -> Iterator[str]:
        for limit in self._problem.limits:
            sizes = limit.sizes_bytes.items()
            least = sum(min(each[k] for k in fixed.get(choice, range(len(each)))) for choice, each in sizes)
            if least > limit.most_bytes:
                yield f"limit: {limit.name} would be at least {_text(least)} of {_text(limit.most_bytes)}"
        for value in self._problem.values:
            if value.choice in fixed or any(reader.choice in fixed for reader in value.readers):
                yield from _blocked(value, fixed)


def blocked(problem: Problem) -> str:
    """A value that nothing can read as it is made, which is why nothing goes together; empty if each can be."""
    return next((reason for value in problem.values for reason in _blocked(value, {})), "")


def _blocked(value: Value, fixed: Fixed) -> Iterator[str]:
    """A reader that no move leads to."""
    made = {value.made[k] for k in fixed.get(value.choice, range(len(value.made)))}
    for reader in value.readers:
        wanted = {reader.wants[k] for k in fixed.get(reader.choice, range(len(reader.wants)))}
        pairs = [(s, t) for s in made for t in wanted]
        if all(pair in reader.never or math.isinf(value.moves_us[pair[0]][pair[1]]) for pair in pairs):
            reasons = dict.fromkeys(reader.never[pair] for pair in pairs if pair in reader.never)
            why = f": {'; '.join(reasons)}" if reasons else ""
            yield f"nothing leads from {_texts(value, made)} to {_texts(value, wanted)} for {value.name}{why}"


def _text(size_bytes: float) -> str:
    return format_bytes(math.ceil(size_bytes))


def _texts(value: Value, placements: Collection[int]) -> str:
    return " or ".join(value.texts[k] if value.texts else str(k) for k in sorted(placements))
