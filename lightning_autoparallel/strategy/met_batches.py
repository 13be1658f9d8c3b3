"""Ranks meet before each training batch where a difference is found: on the group on which they agree.

Lightning's loop broadcasts there whether the job is to end, on the default group, and so does its handler of SIGTERM. A
rank that is elsewhere, in a hook that it alone asks something in, in an evaluation that has more batches on it, or at
the end of its run, never comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from lightning_autoparallel.lightning_compat import SIGTERMException, Trainer, signals_of
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place

NEXT_BATCH = "the next batch of the training"
_ENDS = f"{NEXT_BATCH}, and told to end"
_BROADCAST, _HANDLER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"


class _Meeting:
    """What ranks do before a batch, and at a signal in between."""

    def __init__(self, trainer: Trainer, control: ControlGroup) -> None:
        self._trainer, self._control = trainer, control
        self._is_told = False

    def told(self, signum: Any, frame: Any) -> None:
        """A SIGTERM has come: while ranks train they end together, at their next batch; nothing is sent here."""
        launcher = self._trainer.strategy.launcher
        if not self._is_told and launcher is not None:
            launcher.kill(signum)
        self._is_told = True
        if not self._trainer.training:
            signals_of(self._trainer).received_sigterm = True

    def meet(self) -> None:
        """Before a batch.

        Raises:
            OtherRankError: ranks are in different places.
            SIGTERMException: on all ranks, where one was told to end.
        """
        ends, place = self._is_told, _ENDS if self._is_told else NEXT_BATCH
        if not self._control.agrees(place):
            places = self._control.gather(place)
            if not all(other in (NEXT_BATCH, _ENDS) for other in places):
                raise other_place(places)
            ends = True
        if ends:
            signals_of(self._trainer).received_sigterm = True
            raise SIGTERMException()


@contextlib.contextmanager
def met_before_batches(trainer: Trainer, control: ControlGroup) -> Iterator[None]:
    """While open, ranks agree before each training batch, and all end where one was told to by a signal."""
    meeting, loop, signals = _Meeting(trainer, control), trainer.fit_loop.epoch_loop, signals_of(trainer)
    with contextlib.ExitStack() as stack:
        if not control.alone and hasattr(loop, _BROADCAST) and hasattr(signals, _HANDLER):
            stack.enter_context(mock.patch.object(loop, _BROADCAST, meeting.meet))
            stack.enter_context(mock.patch.object(signals, _HANDLER, meeting.told))
        yield


def meet_at_the_end(control: ControlGroup | None) -> None:
    """Before what only ranks do together that have trained equally long.

    Raises:
        OtherRankError: some have not come here.
    """
    place = "its run's end"
    if control is not None and not control.agrees(place):
        raise other_place(control.gather(place))
