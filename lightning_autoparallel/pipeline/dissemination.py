"""The largest of what every rank has, known to all of them after few hops: how ranks find that they agree.

Gloo's all-reduce passes around a ring, 2 (n - 1) hops of which each waits for the one before. That is fastest among few
ranks. Among many, each sends in round k what it has heard to the rank 2^k places on, and hears from the one 2^k places
before it (dissemination; Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization"): after
ceil(log2 n) rounds it has heard from all, from some more than once, which a maximum does not mind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RING_UP_TO = 8  # ranks
_LOOK_S = 0.001


def peers(rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Whom a rank sends to, and whom it hears from, in each round of a dissemination."""
    distance = 1
    while distance < ranks:
        yield (rank + distance) % ranks, (rank - distance) % ranks
        distance *= 2


def most_of_all(
    mine: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    late: tuple[timedelta, Callable[[], None]] | None = None,
    ring_up_to: int = RING_UP_TO,
) -> Tensor | None:
    """Elementwise maximum over the ranks of a gloo ``group``, all of which call it alike; None after ``timeout``.

    The group is of no use after that. ``late`` is a time and what to call once when it has passed; it goes on waiting.

    Raises:
        RuntimeError: a rank has ended, or the group's own timeout has passed.
    """
    if dist.get_world_size(group) <= ring_up_to:
        return _around_the_ring(mine, group, timeout, late)
    if late is None:
        return _disseminated(mine, group, timeout)
    return _watched(lambda: _disseminated(mine, group, None), *late)


def begun(mine: Tensor, group: dist.ProcessGroup, ring_up_to: int = RING_UP_TO) -> Callable[[], Tensor]:
    """The same maximum on its way while this thread does other things; what it returns waits for it.

    Nothing else may be sent in the ``group`` before.

    Raises:
        RuntimeError: when waiting, as ``most_of_all`` does.
    """
    if dist.get_world_size(group) > ring_up_to:
        return _Exchange(lambda: _disseminated(mine, group, None)).result
    found = mine.clone()
    work: Any = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return found

    return wait


def _around_the_ring(
    mine: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
    late: tuple[timedelta, Callable[[], None]] | None,
) -> Tensor | None:
    found = mine.clone()
    work: Any = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)
    if late is not None:
        _wait_until(work.is_completed, *late)
    return found if _is_done(work, timeout) else None


def _disseminated(mine: Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> Tensor | None:
    found, heard = mine, torch.empty_like(mine)
    ends = None if timeout is None else time.monotonic() + timeout.total_seconds()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for number, (to, of) in enumerate(peers(rank, ranks)):
        sending = dist.isend(found, group=group, group_dst=to, tag=number)
        hearing = dist.irecv(heard, group=group, group_src=of, tag=number)
        for work in (hearing, sending):
            left = None if ends is None else timedelta(seconds=max(ends - time.monotonic(), _LOOK_S))
            if not _is_done(work, left):
                return None
        found = torch.maximum(found, heard)
    return found


def _is_done(work: Any, timeout: timedelta | None) -> bool:
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError:
        if timeout is None:
            raise
        return False
    return True


class _Exchange:
    """On a thread of its own: what waits for a message cannot be asked whether it has come."""

    def __init__(self, exchange: Callable[[], Tensor | None]) -> None:
        self._exchange = exchange
        self._found: Tensor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autoparallel-agreement", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._exchange()
        except BaseException as error:  # raised again on the thread that asked
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Tensor:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None, "without a timeout of its own it ends with that of the group, which raises"
        return self._found


def _watched(exchange: Callable[[], Tensor | None], patience: timedelta, late: Callable[[], None]) -> Tensor | None:
    running = _Exchange(exchange)
    _wait_until(lambda: running.is_done, patience, late)
    return running.result()


def _wait_until(is_done: Callable[[], bool], patience: timedelta, late: Callable[[], None]) -> None:
    deadline = time.monotonic() + patience.total_seconds()
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if not is_done():
        late()
