"""Python of a user's ``autograd.Function`` in the backward: what it reads is guarded, what it changes is refused."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from types import CodeType
from typing import Any

from lightning_autoparallel.capture.messages import Messages
from lightning_autoparallel.capture.randomness import generators_kept
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.sources import is_user_file
from lightning_autoparallel.capture.user_code import StepCalls
from lightning_autoparallel.errors import CaptureError


class OwnBackwards:
    """Follows backwards of one capture; ``calls`` follows the step's own run, and ``seen`` is the code that ran."""

    def __init__(self, reads: StateReads, calls: StepCalls) -> None:
        self._reads, self._calls = reads, calls
        self.in_step = False  # the step itself runs
        self.seen: set[CodeType] = set()

    @contextlib.contextmanager
    def around(self, backward: Any) -> Iterator[None]:
        """One call of ``backward``; it is let be where it is torch's or the engine's.

        Raises:
            CaptureError: it changes something, which would happen at capture only, or reads what has no guard.
        """
        code = getattr(inspect.unwrap(backward), "__code__", None)
        watcher = self._reads.watcher
        if code is None or not is_user_file(code.co_filename) or watcher.in_backward:
            yield
            return
        watcher.in_backward = True
        try:
            line = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
            with self._in_step() if self.in_step else self._alone(line):
                yield
        finally:
            watcher.in_backward = False

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """The step differentiates: what the backward reads and writes is the step's."""
        was, self._reads.on = self._reads.on, True
        try:
            with self._calls.resumed():
                yield
        finally:
            self._reads.on = was

    @contextlib.contextmanager
    def _alone(self, line: str) -> Iterator[None]:
        """The backward of the whole step runs."""
        reads, calls, messages = self._reads, StepCalls(self._reads), Messages(self._reads.watcher)
        drawn: list[str] = []
        with reads.apart():
            try:
                with generators_kept(drawn), messages.held(), reads.recording(), calls.watching():
                    yield
            finally:
                reads.undo_writes()
            self.seen |= calls.seen
            changed = reads.restored or next((made.place.text for made in reads.written.values()), None)
            changed = changed or next((made.place.text for made, _ in reads.changed.values() if made.place), None)
        if reads.watcher.refusal is not None:
            raise reads.watcher.refusal
        what = f"changes {changed}" if changed is not None else None
        what = f"draws from {drawn[0]}" if drawn else what
        what = "logs or warns" if messages.count() else what
        if what is not None:
            raise CaptureError(f"{line} {what} when the backward runs, which would happen at capture only")
