"""What a planner's problem costs, as tables: one for each choice, value, overlap and limit, over the choices in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_autoparallel.plan.problem import Limit, Overlap, Problem, Sizes, Value

Costs = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """``costs`` has one dim for each choice of ``scope``, whose numbers increase; infinite is ruled out."""

    scope: tuple[int, ...]
    costs: Costs

    def over(self, scope: Sequence[int]) -> Costs:
        """The same with dims of size 1 for what else is in ``scope``, whose numbers increase."""
        sizes = dict(zip(self.scope, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(number, 1) for number in scope])


def tables(problem: Problem, without: Collection[int] = ()) -> list[Table]:
    """Their sum is ``Problem.time_us``, and infinite where a limit is passed; ``without`` these values."""
    sizes = [len(choice.times_us) for choice in problem.choices]
    own = [Table((number,), np.array(choice.times_us)) for number, choice in enumerate(problem.choices)]
    moved = {i: _of_value(value, sizes) for i, value in enumerate(problem.values) if i not in without}
    shown = [_of_overlap(overlap, moved, sizes) for overlap in problem.overlaps]
    return [
        *own,
        *moved.values(),
        *shown,
        *(_of_limit(limit, sizes) for limit in problem.limits if limit.most_bytes < math.inf or limit.us_per_byte),
    ]


def added(given: Iterable[Table]) -> Table:
    """One table over all that is in any of them."""
    known = list(given)
    scope = tuple(sorted({number for table in known for number in table.scope}))
    total: Costs = np.zeros((1,) * len(scope))
    for table in sorted(known, key=lambda table: table.costs.size):
        total = total + table.over(scope)
    return Table(scope, total)


def best_of_all(problem: Problem) -> float:
    """The least of every combination; infinite where none is possible."""
    return float(added(tables(problem)).costs.min())


def _of_value(value: Value, sizes: Sequence[int]) -> Table:
    """A move to each placement is paid once, where any reader wants it."""
    scope = tuple(sorted({value.choice, *(reader.choice for reader in value.readers)}))
    made = _along(value.choice, value.made, scope)
    wants = [_along(reader.choice, reader.wants, scope) for reader in value.readers]
    moves = np.array(value.moves_us)
    costs: Costs = np.zeros([sizes[number] for number in scope])
    for target in range(moves.shape[1]):
        wanted = np.zeros(costs.shape, dtype=bool)
        for want in wants:
            wanted |= want == target
        costs += np.where(wanted, moves[:, target][made], 0.0)
    for reader, want in zip(value.readers, wants, strict=True):
        for source, target in reader.never:
            costs[np.broadcast_to((made == source) & (want == target), costs.shape)] = np.inf
    return Table(scope, costs)


def _of_overlap(overlap: Overlap, moved: Mapping[int, Table], sizes: Sequence[int]) -> Table:
    of_moves = {number for value in overlap.moves for number in moved[value].scope}
    scope = tuple(sorted({*overlap.sent_us, *overlap.computed_us, *of_moves}))
    shown: Costs = np.zeros([sizes[number] for number in scope])
    for number, times in overlap.sent_us.items():
        shown = shown + _along(number, times, scope)
    for number, times in overlap.computed_us.items():
        shown = shown - _along(number, times, scope)
    for value, part in overlap.moves.items():
        shown = shown - part * moved[value].over(scope)
    return Table(scope, np.maximum(shown, 0.0))


def _of_limit(limit: Limit, sizes: Sequence[int]) -> Table:
    scope = tuple(sorted({*limit.sizes_bytes, *(number for part in limit.passing_bytes for number in part)}))
    passing: Costs = np.zeros([sizes[number] for number in scope])
    for part in limit.passing_bytes:
        passing = np.maximum(passing, _bytes_of(part, scope))
    kept = _bytes_of(limit.sizes_bytes, scope) + passing
    return Table(scope, np.where(kept > limit.most_bytes, np.inf, limit.us_per_byte * kept))


def _bytes_of(given: Sizes, scope: Sequence[int]) -> Costs:
    total: Costs = np.zeros((1,) * len(scope))
    for number, size in given.items():
        total = total + _along(number, size, scope)
    return total


def _along(number: int, entries: Sequence[float], scope: Sequence[int]) -> NDArray[np.float64] | NDArray[np.int64]:
    """One entry for each alternative, along the dim of that choice."""
    return np.array(entries).reshape([-1 if other == number else 1 for other in scope])
