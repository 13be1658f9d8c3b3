"""Ranks of one attempt find each other in a store that is full of what others have left."""

from __future__ import annotations

import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.strategy.attempts import _ASKED, store_of_attempt

SOON = timedelta(seconds=30)


def meet(store: dist.Store, ranks: int, delayed: int) -> list[dist.Store]:
    """The stores that `ranks` get, of which one comes after the others."""
    found: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        found[rank] = store_of_attempt(rank, ranks, SOON)

    with mock.patch.object(dist, "rendezvous", lambda *args, **kwargs: iter([(store, 0, ranks)])):
        threads = {rank: threading.Thread(target=come, args=(rank,)) for rank in range(ranks)}
        for rank in (*(rank for rank in threads if rank != delayed), delayed):
            threads[rank].start()
        for thread in threads.values():
            thread.join()
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("delayed", [0, 2])
def test_every_attempt_has_a_store_of_its_own(delayed):
    store = dist.HashStore()
    store.append(_ASKED, "somebody-who-was-killed ")  # type: ignore[attr-defined]
    first = meet(store, 3, delayed)
    first[1].set("address", "of the first attempt")
    assert [own.get("address") for own in first] == [b"of the first attempt"] * 3
    again = meet(store, 3, delayed)
    assert [own.check(["address"]) for own in again] == [False] * 3
    again[2].set("address", "of the second")
    assert again[0].get("address") == b"of the second"


def test_a_rank_that_does_not_come():
    with (
        mock.patch.object(dist, "rendezvous", lambda *args, **kwargs: iter([(dist.HashStore(), 0, 3)])),
        pytest.raises(OtherRankError, match="2 of 3 ranks have not come within 0:00:00"),
    ):
        store_of_attempt(0, 3, timedelta(seconds=0.2))
