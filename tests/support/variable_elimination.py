"""The least that a planner's problem can cost, exactly and without a programme: one variable after another goes.

A value with several readers would be one table over all of them. Instead a further variable says which placements are
paid for: it has an entry for each set of them, and every reader is only compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lightning_autoparallel.plan.problem import Problem, Value
from tests.support.cost_tables import Costs, Table, added, tables

Near = dict[int, set[int]]  # by variable those that it is in a table with


@dataclass(frozen=True, kw_only=True)
class Least:
    """``largest`` is the number of entries of the largest table that was needed."""

    time_us: float
    largest: int


def least_of_all(problem: Problem, most_entries: int = 50_000_000) -> Least:
    """By tables over the variables that are left, each minimised over the one that goes, which joins fewest others.

    Raises:
        MemoryError: a table would have more than ``most_entries``.
    """
    in_overlaps = {value for overlap in problem.overlaps for value in overlap.moves}
    readers = {i: {reader.choice for reader in value.readers} for i, value in enumerate(problem.values)}
    shared = [i for i, of_value in readers.items() if len(of_value) > 1 and i not in in_overlaps]
    known = tables(problem, without=shared)
    for i in shared:
        known.extend(_spread(problem.values[i], len(problem.choices) + i))
    sizes = {number: size for table in known for number, size in zip(table.scope, table.costs.shape, strict=True)}
    near: Near = {number: set() for number in sizes}
    for table in known:
        for number in table.scope:
            near[number].update(table.scope)
    largest = 0
    while near:
        goes = min(near, key=lambda number: (_joined(near, number, sizes), number))
        largest = max(largest, math.prod(sizes[number] for number in near[goes]))
        if largest > most_entries:
            raise MemoryError(f"a table over {sorted(near[goes])} would have {largest} entries")
        with_it = [table for table in known if goes in table.scope]
        known = [table for table in known if goes not in table.scope]
        known.append(_without(added(with_it), goes))
        beside = near.pop(goes) - {goes}
        for number in beside:
            near[number] = (near[number] | beside) - {goes}
    return Least(time_us=math.fsum(float(table.costs) for table in known), largest=largest)


def _spread(value: Value, number: int) -> Iterator[Table]:
    """A value's moves with variable ``number``, whose entry i pays for the placements that are bits of i."""
    wanted = sorted({target for reader in value.readers for target in reader.wants})
    sets = [{target for bit, target in enumerate(wanted) if i >> bit & 1} for i in range(1 << len(wanted))]
    paid = [[sum(value.moves_us[made][target] for target in each) for each in sets] for made in value.made]
    yield Table((value.choice, number), np.array(paid))
    for reader in value.readers:
        paid_for = [[0.0 if target in each else math.inf for each in sets] for target in reader.wants]
        yield Table((reader.choice, number), np.array(paid_for))
        if reader.never:
            never = [
                [math.inf if (made, want) in reader.never else 0.0 for want in reader.wants] for made in value.made
            ]
            yield _pair(value.choice, reader.choice, np.array(never))


def _pair(first: int, second: int, costs: Costs) -> Table:
    """A table over two variables, or over one that is both."""
    if first == second:
        return Table((first,), np.diag(costs))
    return Table((first, second), costs) if first < second else Table((second, first), costs.T)


def _joined(near: Near, number: int, sizes: Mapping[int, int]) -> float:
    """How much is joined that was not, where a variable goes: the fill-in, weighed by the sizes of what it joins."""
    pairs = combinations(sorted(near[number] - {number}), 2)
    return sum(math.log(sizes[a]) * math.log(sizes[b]) for a, b in pairs if b not in near[a])


def _without(table: Table, number: int) -> Table:
    """The least over all entries of that variable."""
    position = table.scope.index(number)
    scope = table.scope[:position] + table.scope[position + 1 :]
    return Table(scope, np.min(table.costs, axis=position))
