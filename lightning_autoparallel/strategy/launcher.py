"""Starts a node's processes, and sees to it that none of them is left when one has failed."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lightning_autoparallel.checkpoint import put_back_in
from lightning_autoparallel.lightning_compat import (
    ClusterEnvironment,
    SubprocessScriptLauncher,
    Trainer,
    set_num_threads_if_needed,
)
from lightning_autoparallel.strategy.roll_call import LAUNCHED_BY, PATIENCE_S, RollCall, say

_LOOK_S = 0.5
_BEFORE_RANKS_MEET_S = 5.0  # for others to end, where they would wait for the one that has failed to come
_AFTER_SIGTERM_S = 5.0
_AT_EXIT_S = 3.0  # for children that come to their end too to hear that this rank has ended well


class RankLauncher(SubprocessScriptLauncher):
    """Lightning's launcher; processes of other launchers pass it too: what ``fit`` raises names the rank at fault.

    Where a process that it started fails, the others have half a minute to end with errors of their own, and so have
    they where the first process has ended; those that do not are killed, and said to be.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        roll_call: RollCall,
        timeout: timedelta,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._roll_call, self._patience_s = roll_call, min(PATIENCE_S, timeout.total_seconds())
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no children."""
        return {**vars(self), "procs": []}

    @property
    def is_interactive_compatible(self) -> bool:
        """Where nothing is to be started."""
        return bool(self.cluster_environment.creates_processes_externally)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes of this node, unless they are there, and call ``function``.

        Raises:
            OtherRankError: it failed because another rank did: the error it met is the cause.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        for callback in [] if trainer is None else trainer.checkpoint_callbacks:
            if getattr(callback, "dirpath", None):
                put_back_in(callback.dirpath)  # type: ignore[attr-defined]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._failed = True
            told = self._roll_call.told(error)
            if told is error:
                raise
            raise told from error

    def _start(self) -> None:
        os.environ[LAUNCHED_BY] = str(os.getpid())
        self._call_children_scripts()
        del os.environ[LAUNCHED_BY]
        if not self.procs:
            return
        # called when the process groups are gone, which were registered later
        atexit.register(self._end_children)
        threading.Thread(target=self._watch, name="autoparallel-children", daemon=True).start()

    def _watch(self) -> None:
        """Until this process ends, or a child has failed, or all have ended well."""
        first = self._first_child
        codes: list[int | None] = [None]
        while any(code != 0 for code in codes):
            time.sleep(_LOOK_S)
            codes = [process.poll() for process in self.procs]
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is None:
                continue
            text = _ended_by(self.procs[failed])
            met = self._roll_call.runs
            self._roll_call.report(first + failed, text)
            time.sleep(self._patience_s if met else _BEFORE_RANKS_MEET_S)
            end_process(f"autoparallel: rank {first + failed} has failed ({text}): the others are ended", self.procs)

    def _end_children(self) -> None:
        """At exit: after a failure those that hang are ended, others see this process end; else they end too, or later.

        Nothing is waited for that waits for this rank: gloo's connections last as long as the process.
        """
        if not self._failed:
            return _wait(self.procs, _AT_EXIT_S)
        first = self._first_child
        hanging = [process for i, process in enumerate(self.procs) if first + i in self._roll_call.not_heard_of]
        for process in _running(hanging):
            say(f"autoparallel: rank {first + self.procs.index(process)} hangs: its process {process.pid} is ended")
            process.terminate()
        _wait(hanging, _AFTER_SIGTERM_S)
        for process in _running(hanging):
            process.kill()

    @property
    def _first_child(self) -> int:
        """Its rank."""
        return self.cluster_environment.node_rank() * self.num_processes + 1


def end_process(reason: str, children: Sequence[subprocess.Popen[Any]]) -> None:
    """End this process and its children at once, from whatever thread, and say why."""
    say(reason)
    for process in _running(children):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    os._exit(1)


def _running(processes: Sequence[subprocess.Popen[Any]]) -> list[subprocess.Popen[Any]]:
    return [process for process in processes if process.poll() is None]


def _wait(processes: Sequence[subprocess.Popen[Any]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(0.1)


def _ended_by(process: subprocess.Popen[Any]) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its process {process.pid} {how}"
