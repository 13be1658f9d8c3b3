"""The planner's problem, as data: what is chosen, what a choice costs, and what moving values between choices costs.

Of every ``Choice`` one alternative is taken. It costs its own time, and its values are moved: a value that is made in
one placement and wanted in others is redistributed once into each of those, however many readers want it. What can be
sent while something else computes, or is moved, costs only what that does not hide. The total is the sum over choices,
values and overlaps, each of which may stand for several equal ones. Limits rule out what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

Fixed = Mapping[int, Collection[int]]  # by number of a choice the alternatives that are left to it


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Calls, or parameters, that decide alike: ``times_us`` has one entry for each alternative, for all together."""

    name: str
    times_us: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Who wants a value: for each alternative of ``choice`` the number of the placement that it wants it in.

    Pairs of placements (made, wanted) in ``never`` are ruled out for this reader, whatever the move costs: it says why.
    """

    choice: int
    wants: tuple[int, ...]
    never: Mapping[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Value:
    """What the alternatives of ``choice`` make, by the number of its placement, and who reads it.

    ``moves_us[made][wanted]`` is what a redistribution takes, for all values together that this stands for; infinite
    where nothing leads from one to the other. ``texts`` are the placements by number, for messages.
    """

    name: str
    choice: int
    made: tuple[int, ...]
    readers: tuple[Reader, ...]
    moves_us: tuple[tuple[float, ...], ...]
    texts: tuple[str, ...] = ()

    def time_us(self, taken: Sequence[int]) -> float:
        """Of its moves, where ``taken`` has the alternative of every choice."""
        made = self.made[taken[self.choice]]
        wanted = set()
        for reader in self.readers:
            target = reader.wants[taken[reader.choice]]
            if (made, target) in reader.never:
                return math.inf
            wanted.add(target)
        return sum(self.moves_us[made][target] for target in sorted(wanted))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What is sent beside the rest: a part costs max(0, sum of ``sent_us`` - sum of ``computed_us`` - its moves).

    The former two have, by number of a choice, one entry for each of its alternatives. ``moves`` have the part of the
    moves of a value, by its number, that counts: computing waits for them, and they are sent through another group.
    """

    name: str
    sent_us: Mapping[int, tuple[float, ...]]
    computed_us: Mapping[int, tuple[float, ...]]
    moves: Mapping[int, float] = field(default_factory=dict)

    def time_us(self, taken: Sequence[int], moved_us: Sequence[float] = ()) -> float:
        """What is not hidden: ``taken`` has the alternative of every choice, ``moved_us`` what values' moves take."""
        sent = sum(times[taken[choice]] for choice, times in self.sent_us.items())
        beside = sum(times[taken[choice]] for choice, times in self.computed_us.items())
        return max(0.0, sent - beside - sum(part * moved_us[value] for value, part in self.moves.items()))


Sizes = Mapping[int, tuple[float, ...]]  # bytes of each alternative, by number of a choice


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a rank has room for: the sum of ``sizes_bytes``, and the largest of ``passing_bytes``, at most.

    The former stay through the step; of the latter, those of one part of it at a time. All of it may have a price,
    ``us_per_byte``: of plans that are as fast, the lean is then preferred.
    """

    name: str
    sizes_bytes: Sizes
    most_bytes: float
    passing_bytes: tuple[Sizes, ...] = ()
    us_per_byte: float = 0.0

    def size_bytes(self, taken: Sequence[int]) -> float:
        """Of what ``taken`` has, the alternative of every choice."""
        passing = (_sum_of(sizes, taken) for sizes in self.passing_bytes)
        return self.staying_bytes(taken) + max(passing, default=0.0)

    def staying_bytes(self, taken: Sequence[int]) -> float:
        """Of what stays through the step."""
        return _sum_of(self.sizes_bytes, taken)


def _sum_of(sizes_bytes: Sizes, taken: Sequence[int]) -> float:
    return sum(sizes[taken[choice]] for choice, sizes in sizes_bytes.items())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Choices, and the values that go from one to another; numbers of choices are positions in ``choices``."""

    choices: tuple[Choice, ...]
    values: tuple[Value, ...]
    overlaps: tuple[Overlap, ...] = ()
    limits: tuple[Limit, ...] = ()

    def fits(self, taken: Sequence[int]) -> bool:
        """Whether no limit is passed."""
        return all(limit.size_bytes(taken) <= limit.most_bytes for limit in self.limits)

    def time_us(self, taken: Sequence[int]) -> float:
        """The total of one alternative for each choice, with prices of memory; infinite where a value gets nowhere."""
        own = sum(choice.times_us[k] for choice, k in zip(self.choices, taken, strict=True))
        moved = [value.time_us(taken) for value in self.values]
        memory_us = sum(limit.us_per_byte * limit.size_bytes(taken) for limit in self.limits if limit.us_per_byte)
        return own + sum(moved) + sum(overlap.time_us(taken, moved) for overlap in self.overlaps) + memory_us


def priced(problem: Problem, us_per_byte: float) -> Problem:
    """The problem where what a rank has room for has its price."""
    return replace(problem, limits=tuple(replace(limit, us_per_byte=us_per_byte) for limit in problem.limits))


def unlimited(problem: Problem) -> Problem:
    """The problem with room for everything."""
    limits = tuple(replace(limit, most_bytes=math.inf) for limit in problem.limits)
    return replace(problem, limits=limits)


def restricted(problem: Problem, fixed: Fixed) -> Problem:
    """The problem with only these alternatives left to these choices."""
    choices = [
        replace(choice, times_us=tuple(t if k in fixed[c] else math.inf for k, t in enumerate(choice.times_us)))
        if c in fixed
        else choice
        for c, choice in enumerate(problem.choices)
    ]
    return replace(problem, choices=tuple(choices))
