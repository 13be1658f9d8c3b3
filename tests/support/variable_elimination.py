"""The least that a planner's problem can cost, exactly: choices are eliminated one after another, cheapest first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_autoparallel.plan.problem import Problem
from tests.support.cost_tables import Table, added, tables


@dataclass(frozen=True, kw_only=True)
class Least:
    """``largest`` is the number of entries of the largest table that was needed."""

    time_us: float
    largest: int


def least_of_all(problem: Problem, most_entries: int = 50_000_000) -> Least:
    """By tables over the choices that are left, each minimised over the choice that goes.

    Raises:
        MemoryError: a table would have more than ``most_entries``.
    """
    known = tables(problem)
    sizes = {number: len(choice.times_us) for number, choice in enumerate(problem.choices)}
    near: dict[int, set[int]] = {number: set() for number in sizes}
    for table in known:
        for number in table.scope:
            near[number].update(table.scope)
    largest = 0
    while near:
        goes = min(near, key=lambda number: (_entries(near[number], sizes), number))
        largest = max(largest, _entries(near[goes], sizes))
        if largest > most_entries:
            raise MemoryError(f"a table over {sorted(near[goes])} would have {largest} entries")
        with_it = [table for table in known if goes in table.scope]
        known = [table for table in known if goes not in table.scope]
        known.append(_without(added(with_it), goes))
        beside = near.pop(goes) - {goes}
        for number in beside:
            near[number] = (near[number] | beside) - {goes}
    return Least(time_us=math.fsum(float(table.costs) for table in known), largest=largest)


def _entries(scope: set[int], sizes: dict[int, int]) -> int:
    return math.prod(sizes[number] for number in scope)


def _without(table: Table, number: int) -> Table:
    """The least over all alternatives of that choice."""
    position = table.scope.index(number)
    scope = table.scope[:position] + table.scope[position + 1 :]
    return Table(scope, np.min(table.costs, axis=position))
