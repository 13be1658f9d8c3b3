"""Worlds of real processes, started once per size and shared by all tests of a run."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

# Every job makes process groups of its own, whose threads stay for as long as the process lives; destroying the groups
# while it lives on has crashed ranks at a later job. So worlds are replaced now and then.
JOBS_PER_WORLD = 60

# What every rank imports, a third of a minute of computing for each world of four: a server imports it once, and ranks
# are forked from it. It runs no job and starts no thread, so that ranks find nothing but what was imported.
IMPORTED_ONCE = ("torch._inductor.compile_fx", "transformers", "lightning_autoparallel", "tests.numerics.training")


class WorldError(AssertionError):
    """A rank failed, or did not answer in time; the message holds every rank's traceback."""


class World:
    """`size` processes with a default process group of `backend`; `run` calls one function on all of them.

    Functions must be importable by name; arguments and results are pickled.
    """

    def __init__(self, size: int, imported_once: Sequence[str] = IMPORTED_ONCE, backend: str = "gloo") -> None:
        self.size = size
        self.jobs = 0
        context = get_context("forkserver")
        context.set_forkserver_preload(list(imported_once))
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, backend), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
        """The function's results, by rank.

        Raises:
            WorldError: a rank raised, died, or took longer than `timeout_s`; the world is then stopped.
        """
        answers = self._answers(function, args, timeout_s, until_one_dies=True)
        missing = [rank for rank in range(self.size) if rank not in answers]
        answers.update(dict.fromkeys(missing, (False, "stopped, as another rank died")))
        failures = [f"rank {rank}:\n{answer[1]}" for rank, answer in sorted(answers.items()) if not answer[0]]
        if failures:
            self.stop()
            raise WorldError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.size)]

    def endings(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[str | None]:
        """By rank what each said at last: None if nothing was wrong, else its traceback or how its process died.

        Raises:
            WorldError: a rank took longer than `timeout_s`.
        """
        answers = self._answers(function, args, timeout_s, until_one_dies=False)
        self.stop()
        return [None if answers[rank][0] else answers[rank][1] for rank in range(self.size)]

    def _answers(
        self, function: Callable[..., Any], args: Any, timeout_s: float, until_one_dies: bool
    ) -> dict[int, Any]:
        self.jobs += 1
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise WorldError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s: {answers}")
            for pipe in ready:
                answers[waiting[pipe]] = self._receive(pipe, waiting[pipe])
                if not until_one_dies:
                    pipe.close()  # the process ends, as one would that a launcher has started
            if until_one_dies and not self.alive:
                break  # the others would wait for the dead rank until their timeout
        return answers

    def _receive(self, pipe: Any, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._processes[rank].join(timeout=5)
            return False, f"the process died with exit code {self._processes[rank].exitcode}"

    @property
    def alive(self) -> bool:
        """Whether all processes still serve."""
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Worlds:
    """The worlds of one test run, by size; one that broke is replaced."""

    def __init__(self) -> None:
        self._by_size: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        world = self._by_size.get(size)
        if world is not None and world.jobs >= JOBS_PER_WORLD:
            world.stop()
        if world is None or not world.alive:
            world = self._by_size[size] = World(size)
        return world

    def stop(self) -> None:
        """End all worlds."""
        for world in self._by_size.values():
            world.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(pipe: Connection, rank: int, size: int, port: int, backend: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
    )
    import torch
    import torch._inductor.config
    import torch.distributed as dist

    from lightning_autoparallel.torch_compat.gloo import one_gloo_thread

    # A rank that dies in native code says where: its last words are in the captured stderr of the test.
    faulthandler.enable()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    with one_gloo_thread():
        dist.init_process_group(backend, rank=rank, world_size=size)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        if backend == "nccl":  # several processes share the device
            gc.collect()
            torch.cuda.empty_cache()
