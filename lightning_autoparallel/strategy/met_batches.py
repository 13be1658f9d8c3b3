"""Ranks meet at each training batch where a difference is found: on the group on which they agree.

Lightning's loop broadcasts there whether the job is to end, on the default group, and so does its handler of SIGTERM. A
rank that is elsewhere, in a hook that it alone asks something in, in an evaluation that has more batches on it, or at
the end of its run, never comes. In the same message ranks compare their optimizers: each updates its own shards. Once
they have agreed on a step it is the step's own message, for which nobody waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.optim import Optimizer

from lightning_autoparallel.lightning_compat import SIGTERMException, Trainer, rank_zero_warn, signals_of
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import Carried, first_difference, other_place
from lightning_autoparallel.strategy.seen_by_hooks import has_code_between_steps

NEXT_BATCH = "the next batch of the training"
_ENDS = f"{NEXT_BATCH}, and told to end"
_NUMBERS = (bool, int, float, tuple)
_BROADCAST, _HANDLER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"


@dataclass(frozen=True)
class _Place:
    """Where a rank is, as errors name it, and by what rules its optimizers update."""

    name: str
    rules: dict[str, str]


class _Meeting:
    """What ranks do before a batch, and at a signal in between."""

    def __init__(self, trainer: Trainer, control: ControlGroup) -> None:
        self._trainer, self._control = trainer, control
        self._is_told = False
        self._compares = True  # until optimizers were found to differ
        self._ends = False  # all ranks know that one was told
        self._may_carry: bool | None = None  # on all ranks

    def told(self, signum: Any, frame: Any) -> None:
        """A SIGTERM has come: while ranks train they end together, at their next batch; nothing is sent here."""
        launcher = self._trainer.strategy.launcher
        if not self._is_told and launcher is not None:
            launcher.kill(signum)
        self._is_told = True
        if not self._trainer.training:
            signals_of(self._trainer).received_sigterm = True

    def meet(self) -> None:
        """Before a batch; once ranks have agreed on a step, in the message of the next one, which they run meanwhile.

        Raises:
            OtherRankError: ranks are in different places.
            SIGTERMException: on all ranks, where one was told to end.
        """
        self._ask()
        self._end()

    def ending(self, validate: Callable[[Any], None]) -> Callable[[Any], None]:
        """What comes behind a batch; nothing does where a step's message has told all ranks to end."""

        def run(fetcher: Any) -> None:
            self._end()
            validate(fetcher)

        return run

    def _ask(self) -> None:
        rules = _rules(self._trainer.optimizers) if self._compares else {}
        place = _Place(_ENDS if self._is_told else NEXT_BATCH, rules)
        # Only where the last batch's step had a message, as this one's will: nothing is known of others in between.
        has_trained, self._control.has_trained, self._control.carried = self._control.has_trained, False, None
        is_first = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0
        if has_trained and self._may_carry and not is_first:
            self._control.carried = Carried(repr(place), place, self._heard)
            return
        if not self._control.agrees(repr(place)):
            self._heard(self._control.gather(place))
        else:
            self._ends = self._is_told
        if self._may_carry is None or is_first:  # all ranks are here, and may have other callbacks
            self._may_carry = not self._control.any([has_code_between_steps(self._trainer)])[0]

    def _end(self) -> None:
        """Once all ranks know that one was told to."""
        if self._ends:
            signals_of(self._trainer).received_sigterm = True
            raise SIGTERMException()

    def _heard(self, places: list[Any]) -> None:
        if not all(isinstance(other, _Place) for other in places):
            raise other_place(places)
        self._ends = any(other.name == _ENDS for other in places)
        self._tell([other.rules for other in places])

    def _tell(self, everyone: list[dict[str, str]]) -> None:
        """Of the first difference, once: under DDP copies drift apart in the same way."""
        differing = first_difference(everyone)
        if differing is not None:
            self._compares = False
            rank_zero_warn(
                f"autoparallel: optimizers differ: {differing}. Each rank updates its own part of parameters, so that "
                "parts follow different rules: decide by what ranks have in common (self.all_gather, or "
                "self.log(..., sync_dist=True) of what a scheduler monitors)"
            )


def _rules(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """By what numbers optimizers update how many parameters; tensors, which may be on a device, are not looked at."""
    found: dict[str, str] = {}
    for i, optimizer in enumerate(optimizers):
        found[f"the class of optimizer {i}"] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            of_group = {key: repr(value) for key, value in group.items() if isinstance(value, _NUMBERS)}
            named = {"the number of parameters": str(len(group["params"])), **of_group}
            found |= {f"{key} of group {j} of optimizer {i}": value for key, value in named.items()}
    return found


@contextlib.contextmanager
def met_before_batches(trainer: Trainer, control: ControlGroup) -> Iterator[None]:
    """While open, ranks agree before each training batch, and all end where one was told to by a signal."""
    meeting, loop, signals = _Meeting(trainer, control), trainer.fit_loop.epoch_loop, signals_of(trainer)
    control.carried, control.has_trained = None, False
    with contextlib.ExitStack() as stack:
        if not control.alone and hasattr(loop, _BROADCAST) and hasattr(signals, _HANDLER):
            stack.enter_context(mock.patch.object(loop, _BROADCAST, meeting.meet))
            stack.enter_context(mock.patch.object(signals, _HANDLER, meeting.told))
            stack.enter_context(mock.patch.object(loop, "on_advance_end", meeting.ending(loop.on_advance_end)))
        yield


def meet_at_the_end(control: ControlGroup | None) -> None:
    """Before what only ranks do together that have trained equally long.

    Raises:
        OtherRankError: some have not come here.
    """
    place = "its run's end"
    if control is not None and not control.agrees(place):
        raise other_place(control.gather(place))
