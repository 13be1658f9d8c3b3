"""What ranks write for each other when one of them fails, in the store by which they met."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_autoparallel.torch_compat.default_world import append_to, store_of_world

_FAILURES, _ANSWERS, _ENDED = "failures", "answers", "ended"
_ANSWER_TIME = timedelta(seconds=10)  # of the store


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank's error: of its own, or (``waited``) that of having waited for another rank."""

    rank: int
    text: str
    waited: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank that still runs does, once another has failed; ``waits``: in a collective, or other code of ours."""

    rank: int
    at: str
    waits: bool


class Records:
    """The records of one ``fit`` or sibling, the same on all ranks that have run as many of them.

    Every method raises ``torch.distributed.DistError`` where the store does not answer.
    """

    def __init__(self, rank: int) -> None:
        store = store_of_world(_ANSWER_TIME)
        run = store.add(f"autoparallel/runs/{rank}", 1)
        self._lost: dist.DistError | None = None
        self._store = dist.PrefixStore(f"autoparallel/run/{run}", store)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A store that has not answered once is not asked again: torch writes a trace to stderr each time."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except dist.DistError as error:
            self._lost = error
            raise

    @property
    def is_lost(self) -> bool:
        """Whether the store has not answered."""
        return self._lost is not None

    def any_failure(self) -> bool:
        """Whether a rank has failed."""
        with self._asking():
            return bool(self._store.check([_FAILURES]))

    def fail(self, failure: Failure) -> None:
        """Tell all ranks of a failure."""
        self._append(_FAILURES, json.dumps(asdict(failure)))

    def answer(self, answer: Answer) -> None:
        """Tell all ranks that this one runs."""
        self._append(_ANSWERS, json.dumps(asdict(answer)))

    def end(self, rank: int) -> None:
        """Tell all ranks that this one has ended well."""
        self._append(_ENDED, str(rank))

    def failures(self) -> list[Failure]:
        """Those known by now, first ones first."""
        return [Failure(**json.loads(line)) for line in self._lines(_FAILURES)]

    def answers(self) -> list[Answer]:
        """Of all ranks that run."""
        return [Answer(**json.loads(line)) for line in self._lines(_ANSWERS)]

    def ended(self) -> set[int]:
        """Ranks that have ended well."""
        return {int(line) for line in self._lines(_ENDED)}

    def _append(self, key: str, line: str) -> None:
        with self._asking():
            append_to(self._store, key, line + "\n")

    def _lines(self, key: str) -> Sequence[str]:
        with self._asking():
            return self._store.get(key).decode().splitlines() if self._store.check([key]) else ()
