"""Ranks meet before each training batch where a difference is found: on the group on which they agree.

Lightning's loop broadcasts there whether the job is to end, on the default group. A rank that is elsewhere, in a hook
that it alone asks something in, in an evaluation that has more batches on it, or at the end of its run, never comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from lightning_autoparallel.lightning_compat import SIGTERMException, Trainer
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place

NEXT_BATCH = "the next batch of the training"
_ENDS = f"{NEXT_BATCH}, and told to end"
_BROADCAST = "_broadcast_sigterm_tensor"


@contextlib.contextmanager
def met_before_batches(trainer: Trainer, control: ControlGroup) -> Iterator[None]:
    """While open, ranks agree before each training batch, and all end where one was told to by a signal."""

    def meet() -> None:
        place = _ENDS if getattr(trainer, "received_sigterm", False) else NEXT_BATCH
        if control.agrees(place):
            ends = place == _ENDS
        else:
            places = control.gather(place)
            if not all(other in (NEXT_BATCH, _ENDS) for other in places):
                raise other_place(places)
            ends = True
        if ends:
            raise SIGTERMException()

    loop: Any = trainer.fit_loop.epoch_loop
    with mock.patch.object(loop, _BROADCAST, meet) if hasattr(loop, _BROADCAST) else contextlib.nullcontext():
        yield


def meet_at_the_end(control: ControlGroup | None) -> None:
    """Before what only ranks do together that have trained equally long.

    Raises:
        OtherRankError: some have not come here.
    """
    place = "the end of its run"
    if control is not None and not control.agrees(place):
        raise other_place(control.gather(place))
