"""The planner's problem as columns and rows of a mixed-integer programme.

Variables: ``x[c, k]`` in {0, 1} says that choice c takes alternative k. For each value, reader r, and pair of
placements that may follow each other, ``e[r, s, t]`` in [0, 1] says that it is made in s and wanted in t by r;
``m[s, t]``, that the move is paid.

    sum over k of x[c, k] = 1                                      for each choice
    sum over t of e[r, s, t] = sum of x[c, k] that make s           for each value, reader, s
    sum over s of e[r, s, t] = sum of x[c', k] that want t          for each value, reader, t
    m[s, t] >= e[r, s, t]                                           for each value, reader, and pair that costs anything
    h >= sum of (sent - computed) * x - sum of its moves * m        for each overlap
    p >= sum of passing bytes * x                                   for each part of a limit, in shares of it
    sum of bytes * x + p <= most                                    for each limit, in shares of it
    minimise  sum of times * x + sum of moves * m + sum of h + price * (sum of bytes * x + p) of each limit

Where one reader wants a value, m is e itself. With x integral, e and m are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import highspy
import numpy as np

from lightning_autoparallel.plan.problem import Limit, Overlap, Problem, Reader, Sizes, Value

WHOLE = 1e-6  # as far from 0 or 1 may be what is taken for it, as HiGHS has it


@dataclass
class _Row:
    lower: float
    upper: float
    entries: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class Programme:
    """Columns and rows of a problem; of each choice the columns of its ``alternatives``, by their numbers."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.costs: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self.rows: list[_Row] = []
        self.alternatives = [self._choose(choice.times_us) for choice in problem.choices]
        self._moves = [self._move(value) for value in problem.values]
        for overlap in problem.overlaps:
            self._overlap(overlap)
        for limit in problem.limits:
            if not math.isinf(limit.most_bytes) or limit.us_per_byte:
                self._limit(limit)

    @property
    def are_whole(self) -> np.ndarray:
        """Which columns are to be 0 or 1."""
        return np.array(self._whole, dtype=bool)

    def is_whole(self, values: np.ndarray) -> bool:
        """Whether every choice takes one alternative, all of it."""
        chosen = values[self.are_whole]
        return bool(np.all(np.abs(chosen - np.round(chosen)) < WHOLE))

    def _column(self, cost: float, whole: bool = False, upper: float = 1.0) -> int:
        self.costs.append(cost)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self.costs) - 1

    def _row(self, lower: float, upper: float, entries: dict[int, float]) -> None:
        self.rows.append(_Row(lower, upper, entries))

    def _choose(self, times_us: tuple[float, ...]) -> dict[int, int]:
        """A column for each alternative that is possible, by its number; exactly one of them is 1."""
        columns = {k: self._column(time, True) for k, time in enumerate(times_us) if not math.isinf(time)}
        self._row(1, 1, dict.fromkeys(columns.values(), 1.0))
        return columns

    def _move(self, value: Value) -> dict[int, float]:
        """Columns that say that a move is paid, and what it takes."""
        alone = len(value.readers) == 1
        paying: dict[int, float] = {}
        pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
        for reader in value.readers:
            for (s, t), column in self._pairs(value, reader, alone).items():
                pairs[s, t].append(column)
        for (s, t), columns in pairs.items():
            if alone:
                paying.update(dict.fromkeys(columns, value.moves_us[s][t]))
            elif value.moves_us[s][t]:
                paid = self._column(value.moves_us[s][t])
                paying[paid] = value.moves_us[s][t]
                for column in columns:
                    self._row(0, math.inf, {paid: 1.0, column: -1.0})
        return paying

    def _overlap(self, overlap: Overlap) -> None:
        shown = self._column(1.0, upper=math.inf)
        entries: dict[int, float] = defaultdict(float, {shown: 1.0})
        for sign, by_choice in ((-1.0, overlap.sent_us), (1.0, overlap.computed_us)):
            for choice, times in by_choice.items():
                for k, column in self.alternatives[choice].items():
                    entries[column] += sign * times[k]
        for value, part in overlap.moves.items():
            entries.update({column: part * time_us for column, time_us in self._moves[value].items()})
        self._row(0, math.inf, entries)

    def _limit(self, limit: Limit) -> None:
        is_limit = not math.isinf(limit.most_bytes)
        unit_bytes = limit.most_bytes if is_limit else _largest(limit)
        entries = self._shares(limit.sizes_bytes, unit_bytes)
        for column, share in entries.items():
            self.costs[column] += limit.us_per_byte * unit_bytes * share
        if limit.passing_bytes:
            passing = self._column(limit.us_per_byte * unit_bytes, upper=math.inf)
            entries[passing] = 1.0
            for sizes in limit.passing_bytes:
                shares = self._shares(sizes, unit_bytes)
                self._row(0, math.inf, {passing: 1.0, **{column: -share for column, share in shares.items()}})
        if is_limit:
            self._row(-math.inf, 1.0, entries)

    def _shares(self, sizes_bytes: Sizes, unit_bytes: float) -> dict[int, float]:
        entries: dict[int, float] = defaultdict(float)
        for choice, sizes in sizes_bytes.items():
            for k, column in self.alternatives[choice].items():
                entries[column] += sizes[k] / unit_bytes
        return entries

    def _pairs(self, value: Value, reader: Reader, paying: bool) -> dict[tuple[int, int], int]:
        """Columns of what is made in one placement and wanted in another, and the rows that tie them to choices."""
        made, wanted = self._by_placement(value.choice, value.made), self._by_placement(reader.choice, reader.wants)
        columns = {
            (s, t): self._column(value.moves_us[s][t] if paying else 0.0)
            for s in made
            for t in wanted
            if (s, t) not in reader.never and not math.isinf(value.moves_us[s][t])
        }
        for s, alternatives in made.items():
            self._tie([column for (a, _), column in columns.items() if a == s], alternatives)
        for t, alternatives in wanted.items():
            self._tie([column for (_, b), column in columns.items() if b == t], alternatives)
        return columns

    def _by_placement(self, choice: int, placements: tuple[int, ...]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for k, column in self.alternatives[choice].items():
            found[placements[k]].append(column)
        return found

    def _tie(self, pairs: list[int], alternatives: list[int]) -> None:
        self._row(0, 0, {**dict.fromkeys(pairs, 1.0), **dict.fromkeys(alternatives, -1.0)})

    def model(self) -> highspy.HighsLp:
        """For HiGHS, by rows."""
        model = highspy.HighsLp()
        count = len(self.costs)
        model.num_col_, model.num_row_ = count, len(self.rows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(count), np.array(self._upper)
        model.row_lower_ = np.array([row.lower for row in self.rows])
        model.row_upper_ = np.array([row.upper for row in self.rows])
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[whole] for whole in self._whole]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(row.entries) for row in self.rows)])
        model.a_matrix_.index_ = np.array([column for row in self.rows for column in row.entries])
        model.a_matrix_.value_ = np.array([entry for row in self.rows for entry in row.entries.values()])
        return model

    def taken(self, values: np.ndarray) -> tuple[int, ...]:
        """The alternative of each choice."""
        return tuple(max(columns, key=lambda k: values[columns[k]]) for columns in self.alternatives)

    def solution_of(self, taken: tuple[int, ...]) -> highspy.HighsSolution:
        """The choices alone: HiGHS finds the rest."""
        solution = highspy.HighsSolution()
        values = np.full(len(self.costs), highspy.kHighsInf)
        for columns, k in zip(self.alternatives, taken, strict=True):
            for number, column in columns.items():
                values[column] = float(number == k)
        solution.col_value = list(values)
        return solution


def _largest(limit: Limit) -> float:
    """Of all sizes in it, in bytes: entries of rows are to be neither huge nor tiny."""
    parts = (limit.sizes_bytes, *limit.passing_bytes)
    return max((size for part in parts for sizes in part.values() for size in sizes), default=0.0) or 1.0
