"""Backwards of captured calls: ranks agree on each of them, so that one whose loss leaves a call out still joins.

A call's backward launches collectives. Where a rank comes to an earlier call than the others, or to the end, it first
runs what they run, with gradients of zero: its part of a mean. Where ranks' losses depend on different results of one
call, all compute the gradients that any of them needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.pipeline.agreement import ControlGroup, other_place

END = "the end of the backward"
_CALL, _RESULTS = "the backward of call ", ", results "

Gradients = list[tuple[Tensor, Tensor]]  # parameters and what is to be added to their gradients
Results = tuple[int, ...]  # places of those results of a call that have gradients


class BackwardCalls:
    """The captured calls of steps, by numbers that are the same on all ranks."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._joins: dict[int, Callable[[Results], Gradients]] = {}
        self._made = 0
        self._joined: Gradients = []

    def clear(self) -> None:
        """No rank's backward will leave an earlier call out."""
        self._joins.clear()

    def add(self, join: Callable[[Results], Gradients]) -> int:
        """A call was made; ``join`` runs its backward for the other ranks alone, which have gradients of results."""
        self._made += 1
        self._joins[self._made] = join
        return self._made

    def reach(self, number: int, given: Results, run: Callable[[bool, Results], Any]) -> Any:
        """``run(last, results)``, the backward of a call with this rank's gradients, once all ranks run it or join in.

        ``last`` says that no rank will come to it again. This rank has gradients of the ``given`` results; ``results``
        are those of which any rank has some.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        mine = f"{_CALL}{number}{_RESULTS}{','.join(map(str, given))}"
        while not self._control.agrees(mine):
            latest, results, are_all = self._latest(mine)
            if latest == number:
                return run(are_all, results)
            self._join(latest, results)
        return run(True, given)

    def end(self) -> Gradients:
        """This rank's backward is over; it joins those of others, and is given what it got by joining.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        while not self._control.agrees(END):
            latest, results, _ = self._latest(END)
            self._join(latest, results)
        joined, self._joined = self._joined, []
        return joined

    def _latest(self, mine: str) -> tuple[int, Results, bool]:
        """The last call that a rank is at, its results with gradients on any rank there, and whether all are there."""
        places = self._control.gather(mine)
        if not all(place == END or str(place).startswith(_CALL) for place in places):
            raise other_place(places)
        calls = [str(place).removeprefix(_CALL).split(_RESULTS) for place in places if place != END]
        latest = max(int(number) for number, _ in calls)
        there = [results for number, results in calls if int(number) == latest]
        given = sorted({int(result) for results in there for result in results.split(",") if result})
        return latest, tuple(given), len(there) == len(places)

    def _join(self, number: int, results: Results) -> None:
        if number not in self._joins:
            raise OtherRankError(
                f"another rank runs the backward of a call that this rank's loss leaves out (call {number}), and it is "
                "too late to join: let losses of all ranks depend on the same calls"
            )
        self._joined += self._joins[number](results)
