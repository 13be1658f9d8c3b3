"""Backwards of captured calls: ranks agree on each of them, so that one whose loss leaves a call out still joins.

A call's backward launches collectives. Where a rank comes to an earlier call than the others, or to the end, it first
runs what they run, with gradients of zero: its part of a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.pipeline.agreement import ControlGroup, other_place

END = "the end of the backward"
_CALL = "the backward of call "

Gradients = list[tuple[Tensor, Tensor]]  # parameters and what is to be added to their gradients


class BackwardCalls:
    """The captured calls of steps, by numbers that are the same on all ranks."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._joins: dict[int, Callable[[], Gradients]] = {}
        self._made = 0
        self._joined: Gradients = []

    def clear(self) -> None:
        """No rank's backward will leave an earlier call out."""
        self._joins.clear()

    def add(self, join: Callable[[], Gradients]) -> int:
        """A call was made; ``join`` runs its backward for the other ranks alone."""
        self._made += 1
        self._joins[self._made] = join
        return self._made

    def reach(self, number: int, run: Callable[[bool], Any]) -> Any:
        """``run(last)``, the backward of a call with this rank's gradients, once all ranks run it or join in.

        ``last`` says that no rank will come to it again.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        while not self._control.agrees(f"{_CALL}{number}"):
            latest = self._latest(f"{_CALL}{number}")
            if latest == number:
                return run(False)
            self._join(latest)
        return run(True)

    def end(self) -> Gradients:
        """This rank's backward is over; it joins those of others, and is given what it got by joining.

        Raises:
            OtherRankError: another rank is at no backward.
        """
        while not self._control.agrees(END):
            self._join(self._latest(END))
        joined, self._joined = self._joined, []
        return joined

    def _latest(self, mine: str) -> int:
        places = self._control.gather(mine)
        if not all(place == END or str(place).startswith(_CALL) for place in places):
            raise other_place(places)
        return max(int(str(place).removeprefix(_CALL)) for place in places if place != END)

    def _join(self, number: int) -> None:
        if number not in self._joins:
            raise OtherRankError(
                f"another rank runs the backward of a call that this rank's loss leaves out (call {number}), and it is "
                "too late to join: let losses of all ranks depend on the same calls"
            )
        self._joined += self._joins[number]()
