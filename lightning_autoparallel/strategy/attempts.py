"""Ranks that torchrun has started again meet in the store of the attempt before, and must not take its keys for theirs.

The agent's store outlives the ranks (torch 2.13, ``elastic/rendezvous/dynamic_rendezvous.py``): where a new rank 0 is
faster than a new rank 1, it finds the old one's address, and fails to reach it. Agents count restarts each for itself:
no number is known to all ranks. Rank 0 draws a name for the attempt and answers every rank that asks.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.torch_compat.default_world import append_to

_ASKED = "autoparallel/asked"  # by ranks of all attempts: names that they have drawn for themselves
_LOOK_S = 0.05


def is_restartable() -> bool:
    """Whether an agent of torchrun holds the store by which ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The agent's store, where it has nothing of an attempt before; every rank calls it.

    Raises:
        OtherRankError: on rank 0, if some rank has not come within ``timeout``.
        torch.distributed.DistStoreError: on another, if rank 0 has not.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    attempt = _named(store, world_size, timeout) if rank == 0 else _asked(store, timeout)
    return dist.PrefixStore(f"autoparallel/attempt/{attempt}", store)


def _named(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """On rank 0: answer until every rank of this attempt has taken note; those of others never do."""
    attempt, answered = uuid.uuid4().hex, 0
    deadline = time.monotonic() + timeout.total_seconds()
    while (noted := store.add(_noted(attempt), 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise OtherRankError(f"{world_size - 1 - noted} of {world_size} ranks have not come within {timeout}")
        names = store.get(_ASKED).decode().split() if store.check([_ASKED]) else []
        for name in names[answered:]:
            store.set(_answer(name), attempt)
        answered = len(names)
        time.sleep(_LOOK_S)
    return attempt


def _asked(store: dist.Store, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    append_to(store, _ASKED, f"{name} ")
    store.wait([_answer(name)], timeout)
    attempt = store.get(_answer(name)).decode()
    store.add(_noted(attempt), 1)
    return attempt


def _answer(name: str) -> str:
    return f"autoparallel/answer/{name}"


def _noted(attempt: str) -> str:
    return f"autoparallel/noted/{attempt}"
