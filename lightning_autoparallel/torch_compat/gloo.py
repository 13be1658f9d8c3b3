"""Gloo process groups that do not corrupt the heap."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo

from lightning_autoparallel.torch_compat.default_world import backend_of


class _OneThreadGloo(ProcessGroupGloo):
    """A gloo group with one worker thread; torch makes two and gives Python no other way to say so."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1
        options._timeout = timeout
        options._devices = _devices()
        for name, value in others.items():  # torch 2.14: enable_reconfigure
            if value:
                setattr(options, name, value)
        super().__init__(store, rank, size, options)


def _devices() -> list[Any]:
    """Those of the default group, where there is one: every device has a thread that wakes up all the time."""
    if dist.is_initialized() and backend_of("cpu") == dist.Backend.GLOO:
        return list(_default_options()._devices)
    # torch reads this variable where it makes a group without options, and is given some here: on hosts whose names
    # resolve to the loopback device, nothing else leads to the others.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    return [ProcessGroupGloo.create_default_device()]


def _default_options() -> Any:
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(torch.device("cpu")).options


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Gloo groups made inside run their collectives one after another, on one thread each instead of two.

    Both threads of a torch 2.13 group assign the name of the collective they start or have finished to one
    `std::string` (`ProcessGroupStatus` in `torch/csrc/distributed/c10d/logger.hpp`) without a lock. Names over 15
    characters, like ALLGATHER_COALESCED, lie on the heap, and are freed twice when the threads meet there: ranks die
    with `malloc(): unaligned tcache chunk detected` or a segmentation fault, some collectives later.
    `python -m tests.benchmarks.gloo_overlap` shows it.
    """
    with mock.patch.object(c10d, "ProcessGroupGloo", _OneThreadGloo):
        yield


def own_gloo_groups(device_type: str) -> Any:
    """A `backend_override` with which a device mesh does not take the default group; None unless it is on gloo.

    The default group is made by others, with two threads. The timeout stays the default group's.
    """
    if backend_of(device_type) != dist.Backend.GLOO:
        return None
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _default_options()._timeout
    return "gloo", options
