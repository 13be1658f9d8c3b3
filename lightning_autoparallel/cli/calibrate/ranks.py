"""The ranks of a calibration: those of a launcher, or processes that are started here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from lightning_autoparallel.cli.bench.processes import environment, failure
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.torch_compat.freed_memory import keep_freed_memory

_TIMEOUT = timedelta(minutes=2)  # of what ranks do together: importing torch, one collective


def world_size(processes: int) -> int:
    """Ranks of the launcher that there is, else the processes that are to be started."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else processes


def local_ranks(processes: int) -> int:
    """Ranks on this node, of a launcher or to be started."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size(processes)))


def is_launched() -> bool:
    """Whether something else started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def running_ranks(
    command: Sequence[str], device_type: str, processes: int, threads: int, timeout: timedelta = _TIMEOUT
) -> Iterator[None]:
    """Inside, a process group of all ranks: this one, and those of the launcher, or others that run ``command``.

    Args:
        command: arguments of Python with which the other ranks do the same as this one.
        device_type: ``cpu``, over gloo, or ``cuda``, over NCCL.
        processes: ranks, unless a launcher has started them.
        threads: of each of these processes.
        timeout: of whatever ranks do together.

    Raises:
        AutoParallelError: one of the started ranks failed; what it said last is in the message.
    """
    with ExitStack() as stack:
        others = None if is_launched() else _Others.started(command, processes, threads, stack)
        try:
            with _process_group(device_type, timeout):
                yield
        except (RuntimeError, dist.DistError) as error:
            if others is None or not others.failed():
                raise
            raise AutoParallelError(failure(others.folder, others.codes())) from error


@contextmanager
def _process_group(device_type: str, timeout: timedelta) -> Iterator[None]:
    keep_freed_memory(torch.device(device_type))  # as training does
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class _Others:
    """Ranks 1 and on, printing to ``folder``; this process is rank 0."""

    folder: Path
    processes: Sequence[subprocess.Popen[bytes]]

    @classmethod
    def started(cls, command: Sequence[str], processes: int, threads: int, stack: ExitStack) -> _Others:
        """Start them, until ``stack`` ends."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoparallel-calibrate-")))
        shared = environment(os.environ, folder, processes, threads) | {"LOCAL_WORLD_SIZE": str(processes)}
        others = [_started(command, rank, shared, folder, stack) for rank in range(1, processes)]
        stack.enter_context(mock.patch.dict(os.environ, {**shared, **_own(0)}))
        return cls(folder=folder, processes=others)

    def codes(self) -> list[int | None]:
        """How each rank has ended so far, this one, which has not, included."""
        return [None, *(process.poll() for process in self.processes)]

    def failed(self) -> bool:
        """Whether one of them has ended with an error."""
        return any(self.codes())


def _started(
    command: Sequence[str], rank: int, shared: Mapping[str, str], folder: Path, stack: ExitStack
) -> subprocess.Popen[bytes]:
    log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
    whole = [sys.executable, *command]
    process = subprocess.Popen(whole, env={**shared, **_own(rank)}, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _own(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
