"""Backwards of captured calls: ranks agree on each of them, so that one whose loss leaves a call out still joins.

A call's backward launches collectives. Where a rank comes to another one than the others, or to the end, it runs what
they run with gradients of zero first: its part of a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.pipeline.agreement import ControlGroup, other_place

_END = "the end of the backward"
_CALL = "the backward of call "


class BackwardCalls:
    """The captured calls of one step, in order, which is the same on all ranks."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._joins: list[Callable[[], None] | None] = []

    def clear(self) -> None:
        """Another step begins, or no backward will follow."""
        self._joins.clear()

    def add(self, join: Callable[[], None]) -> int:
        """A call was made; ``join`` runs its backward for the other ranks alone."""
        self._joins.append(join)
        return len(self._joins) - 1

    def reach(self, number: int, run: Callable[[bool], Any]) -> Any:
        """``run(last)``, the backward of a call with this rank's gradients, once all ranks run it or join in.

        ``last`` says that no rank will come to it again.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        if self._control.agrees(f"{_CALL}{number}"):
            return run(True)
        result = None
        for other in sorted(self._elsewhere(f"{_CALL}{number}"), reverse=True):
            if other == number:
                result = run(False)
            else:
                self._join(other)
        return result

    def end(self) -> None:
        """This rank's backward is over; it joins those of others.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        while not self._control.agrees(_END):
            for other in sorted(self._elsewhere(_END), reverse=True):
                self._join(other)

    def _elsewhere(self, mine: str) -> set[int]:
        places = self._control.gather(mine)
        if not all(place == _END or str(place).startswith(_CALL) for place in places):
            raise other_place(places)
        return {int(str(place).removeprefix(_CALL)) for place in places if place != _END}

    def _join(self, number: int) -> None:
        join = self._joins[number] if number < len(self._joins) else None
        if join is None:
            raise OtherRankError(f"this rank has no call {number}, whose backward another rank runs")
        join()
