"""A step's message: what ranks are about to run, with what else they compare at each batch, before or while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_autoparallel.pipeline.agreement import ControlGroup, StepIdentity, differences_of_step, other_place


@dataclass(frozen=True)
class StepPlace:
    """Where a rank is that is about to run a step, or runs it ahead, with what its message has ``carried`` besides."""

    step: StepIdentity
    carried: Any

    @property
    def name(self) -> str:
        """As errors name the place."""
        return getattr(self.carried, "name", self.step.name)


def compare_step(control: ControlGroup, mine: StepIdentity, ahead: bool, training: bool) -> Callable[[], list[str]]:
    """Compare what ranks are about to run, or run already, ``ahead`` of the answer.

    What it returns waits for that, and gives what they have written different values into, where they differ in nothing
    else.

    Raises:
        AutoParallelError: when waiting, on all ranks: those of ``differences_of_step``, or (OtherRankError) some are
            elsewhere.
    """
    carried, control.carried = control.carried, None
    text = f"{carried.text if carried is not None else ''} {mine!r}"
    answer = control.begin(text) if ahead else lambda: control.agrees(text)

    def differences() -> list[str]:
        agreed = answer()
        if agreed and carried is not None:
            carried.told([carried.value])
        found = [] if agreed else _found(control.gather(StepPlace(mine, carried and carried.value)))
        control.has_trained = training
        return found

    def _found(places: list[Any]) -> list[str]:
        if any(not isinstance(place, StepPlace) or (place.carried is None) != (carried is None) for place in places):
            raise other_place(places)
        if carried is not None:
            carried.told([place.carried for place in places])
        steps = [place.step for place in places]
        return differences_of_step(steps) if any(step != steps[0] for step in steps) else []

    return differences
