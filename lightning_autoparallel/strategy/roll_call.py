"""Which rank has failed: told to all others, whose own errors only say that somebody did not come.

While all goes well, a thread asks the store once a second whether a rank has failed, and that is all. Once one has,
every rank that runs says what it does: those that say nothing are gone. Nothing here is a collective, so that nothing
waits for a rank that will not come.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_autoparallel.capture.sources import is_user_file, place_of
from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.strategy.records import Answer, Failure, Records
from lightning_autoparallel.torch_compat.default_world import is_lost_connection

LAUNCHED_BY = "LIGHTNING_AUTOPARALLEL_LAUNCHED_BY"  # the id of the process that started this one
_LOOK_S = 1.0
_HEARD_S = 3.0  # for others to hear of an error of this rank, before its process and with it the store may end
_ANSWER_S = 10.0  # for others to say that they run
_AFTER_TIMEOUT_S = 30.0  # for a rank to end by the error of a collective that ran into the same timeout
PATIENCE_S = 30.0  # for ranks to end by themselves, once the one that started them, or that they started, has
_GONE = "is gone without a word: killed, or its machine has failed"
_LONGEST = 500  # characters of an error's message
_INNER = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


class RollCall:
    """Tells other ranks of this one's failure, and this rank of theirs; one for each strategy.

    Once a rank has failed, the others have ``timeout`` and half a minute to leave ``fit`` by the errors that they meet.
    Then ``end_process`` is called with the reason, on a thread: the rank hangs.
    """

    def __init__(self, timeout: timedelta, end_process: Callable[[str], None]) -> None:
        self._timeout_s, self._end_process = timeout.total_seconds(), end_process
        self._records: Records | None = None
        self._known: list[Failure] = []
        self._answers: list[Answer] = []
        self._ended: set[int] = set()
        self._not_heard_of: set[int] = set()
        self._stopped = threading.Event()
        self._rank = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"timeout_s": self._timeout_s, "end_process": self._end_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RollCall.__init__(self, timedelta(seconds=state["timeout_s"]), state["end_process"])

    @property
    def not_heard_of(self) -> set[int]:
        """Ranks that this one has waited for in vain, and that have not said that they wait themselves."""
        return self._not_heard_of

    @property
    def runs(self) -> bool:
        """Whether ranks have met, and this one has not ended."""
        return self._records is not None

    def start(self) -> None:
        """Ranks have met; the thread that calls this is the one that trains."""
        self.stop()
        if dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return
        self._rank, self._stopped = dist.get_rank(), threading.Event()
        self._known, self._answers, self._ended = [], [], set()
        self._records = Records(self._rank)
        watch = _Watch(self, self._records, self._stopped, threading.get_ident())
        threading.Thread(target=watch.run, name="autoparallel-roll-call", daemon=True).start()

    def stop(self, well: bool = True) -> None:
        """This rank has ended, ``well`` or by an error."""
        self._stopped.set()
        if self._records is not None and well:
            with contextlib.suppress(dist.DistError):  # others may have ended before
                self._records.end(self._rank)
        self._records = None

    def report(self, rank: int, text: str) -> None:
        """Tell all ranks what became of ``rank``, which has not told it by itself."""
        if any(known.rank == rank for known in self.look()):
            return
        failure = Failure(rank=rank, text=text)
        self._known.append(failure)
        if self._records is not None:
            with contextlib.suppress(dist.DistError):
                self._records.fail(failure)

    def look(self) -> list[Failure]:
        """The failures that are known by now."""
        if self._records is not None:
            with contextlib.suppress(dist.DistError):  # what is known stays known
                self._known = self._records.failures() or self._known
                self._answers, self._ended = self._records.answers(), self._records.ended()
        return self._known

    def told(self, error: BaseException) -> BaseException:
        """Tell all ranks that this one ends with ``error``, and return it, or one that names the rank at fault.

        Waits for others to hear of it, or, where it comes of waiting for another rank, to learn which: some seconds.
        """
        if self._records is None:
            return error
        lost = is_lost_connection(error)
        waited = lost or isinstance(error, OtherRankError)
        with contextlib.suppress(dist.DistError):
            self._records.fail(Failure(rank=self._rank, text=described(error), waited=waited))
        self._wait(self._is_clear if lost else self._everyone_heard, _ANSWER_S if lost else _HEARD_S)
        found = self.verdict() if lost else None
        if waited and self._rank == 0:  # with which the store may end: others shall know the answers that it knows
            self._wait(lambda: False, 2 * _LOOK_S)
        return error if found is None else OtherRankError(f"{found}; rank {self._rank} waited for it")

    def verdict(self) -> str | None:
        """What is known of the rank at fault; None where all ranks only waited."""
        causes = [failure for failure in self.look() if not failure.waited and failure.rank != self._rank]
        if causes:
            return f"rank {causes[0].rank} has failed: {causes[0].text}"
        if self._records is None:
            return None
        accounted, of_agent = self._accounted(), "TORCHELASTIC_USE_AGENT_STORE" in os.environ
        if self._records.is_lost and (of_agent or 0 not in accounted | self._ended):
            holder = "the agent of torchrun" if of_agent else "rank 0"
            return f"{holder} {_GONE} (the store by which ranks meet, which it holds, does not answer)"
        return self._verdict_of_answers(accounted)

    def _accounted(self) -> set[int]:
        return {self._rank, *(failure.rank for failure in self._known)}

    def _verdict_of_answers(self, accounted: set[int]) -> str | None:
        ended, answers = self._ended, [one for one in self._answers if one.rank not in accounted]
        silent = set(range(dist.get_world_size())) - accounted - ended - {one.rank for one in answers}
        late = [one for one in answers if not one.waits] or answers
        self._not_heard_of = silent | {one.rank for one in answers if not one.waits}
        said = [
            *(f"rank {rank} has ended before" for rank in sorted(ended - accounted)[:8]),
            *(f"rank {rank} {_GONE}" for rank in sorted(silent)[:8]),
            *(f"rank {one.rank} has not come: it is at {one.at}" for one in late[: 0 if silent else 8]),
        ]
        return ", ".join(said) or None

    def _is_clear(self) -> bool:
        """Whether there is no use in waiting for more words."""
        assert self._records is not None
        causes = any(not failure.waited for failure in self.look())
        return causes or self._everyone_heard()

    def _everyone_heard(self) -> bool:
        assert self._records is not None
        heard = {one.rank for one in self._records.answers()} | {one.rank for one in self._records.failures()}
        return len(heard | self._records.ended() | {self._rank}) == dist.get_world_size()

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if reached():
                    return
                time.sleep(0.1)
            except dist.DistError:
                return  # the store is gone: there will be no more words
            except RuntimeError as error:
                # Lightning answers SIGTERM, which launchers send now, with a collective, wherever this thread is
                if not is_lost_connection(error):
                    raise

    def end_process(self, reason: str) -> None:
        """End this process, which cannot end by itself."""
        self._end_process(f"autoparallel: rank {self._rank} ends its process: {reason}")

    @property
    def timeout_s(self) -> float:
        """For a rank to leave, once another has failed."""
        return self._timeout_s

    @property
    def rank(self) -> int:
        """This one."""
        return self._rank


class _Watch:
    """The thread's work."""

    def __init__(self, roll_call: RollCall, records: Records, stopped: threading.Event, thread: int) -> None:
        self._roll_call, self._records, self._stopped, self._thread = roll_call, records, stopped, thread
        launcher = os.environ.get(LAUNCHED_BY)
        self._parent = int(launcher) if launcher is not None and int(launcher) == os.getppid() else None

    def run(self) -> None:
        """Until training ends, with or without a failure."""
        while not self._stopped.wait(_LOOK_S):
            if self._alarmed():
                return self._after_alarm()

    def _alarmed(self) -> bool:
        if self._is_orphan:
            return True
        try:
            if self._parent is not None and 0 in self._records.ended():
                self._parent = None
            if not self._records.any_failure():
                return False
            self._roll_call.look()  # before others see that this rank has heard: then the store may end
            self._records.answer(self._answer())
        except dist.DistError:
            return False  # whoever held the store may have ended well
        return True

    @property
    def _is_orphan(self) -> bool:
        """Whether the process that started this one has ended, and not well."""
        return self._parent is not None and os.getppid() != self._parent

    def _after_alarm(self) -> None:
        """Keep what is said, as the store may end, until this rank has left, or has to."""
        start, said, orphan_since = time.monotonic(), False, math.inf
        while not self._stopped.wait(_LOOK_S):
            now = time.monotonic()
            known = self._roll_call.look()
            orphan_since = min(orphan_since, now) if self._is_orphan else math.inf
            deadline = min(
                start + self._roll_call.timeout_s + _AFTER_TIMEOUT_S,
                orphan_since + min(PATIENCE_S, self._roll_call.timeout_s),
            )
            if now > deadline:
                return self._roll_call.end_process(f"{self._why()}, and it is still at {self._answer().at}")
            mine = any(failure.rank == self._roll_call.rank for failure in known)
            if now > start + _ANSWER_S and not mine and not said:
                said = True
                say(
                    f"autoparallel: {self._why()}. Rank {self._roll_call.rank} is at {self._answer().at}, and has "
                    f"{timedelta(seconds=round(deadline - now))} to come from there"
                )

    def _why(self) -> str:
        if self._is_orphan:
            return "the process that started it has ended"
        return self._roll_call.verdict() or "other ranks have waited for one that did not come"

    def _answer(self) -> Answer:
        at, waits = place_of_frame(sys._current_frames().get(self._thread))
        return Answer(rank=self._roll_call.rank, at=at, waits=waits)


def described(error: BaseException) -> str:
    """An error in one line, with the user's line that raised it."""
    place = place_of(error)
    shown = f"{type(error).__name__}: {str(error)[:_LONGEST]}" if str(error) else type(error).__name__
    return shown if place is None else f"{shown} ({place.called_from or place.source})"


def place_of_frame(frame: FrameType | None) -> tuple[str, bool]:
    """``train.py:88 in forward``, the innermost line of the user's if any, and whether code of torch or ours runs."""
    if frame is None:
        return "its end", False
    own: FrameType | None = frame
    while own is not None and not is_user_file(own.f_code.co_filename):
        own = own.f_back
    shown = own or frame
    at = f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno} in {shown.f_code.co_name}"
    return at, frame.f_code.co_filename.startswith(_INNER)


def say(text: str) -> None:
    """To the user, whatever has become of loggers and other ranks."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
