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
from dataclasses import dataclass
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
    return _watched(lambda: _disseminated(mine, group, timeout), *late)


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


@dataclass
class _Outcome:
    found: Tensor | None = None
    error: BaseException | None = None


def _watched(exchange: Callable[[], Tensor | None], patience: timedelta, late: Callable[[], None]) -> Tensor | None:
    """On a thread of its own: what waits for a message cannot be asked whether it has come."""
    outcome = _Outcome()

    def run() -> None:
        try:
            outcome.found = exchange()
        except BaseException as error:  # raised again below, on the thread that asked
            outcome.error = error

    thread = threading.Thread(target=run, name="autoparallel-agreement", daemon=True)
    thread.start()
    _wait_until(lambda: not thread.is_alive(), patience, late)
    thread.join()
    if outcome.error is not None:
        raise outcome.error
    return outcome.found


def _wait_until(is_done: Callable[[], bool], patience: timedelta, late: Callable[[], None]) -> None:
    deadline = time.monotonic() + patience.total_seconds()
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if not is_done():
        late()
