"""Who starts processes watches them for as long as there are any, and no longer."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_autoparallel.strategy.launcher import RankLauncher
from lightning_autoparallel.strategy.roll_call import RollCall


class Children(RankLauncher):
    """Starts processes that end when they are told."""

    def _call_children_scripts(self) -> None:
        wait = [sys.executable, "-c", "input()"]
        self.procs = [subprocess.Popen(wait, stdin=subprocess.PIPE) for _ in range(self.num_processes - 1)]


def launch(processes: int) -> Children:
    timeout = timedelta(seconds=5)
    launcher = Children(LightningEnvironment(), processes, 1, RollCall(timeout, lambda reason: None), timeout)
    assert launcher.launch(lambda: "done") == "done"
    return launcher


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "autoparallel-children"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_has_nobody_to_watch() -> None:
    launch(1)
    assert not watching()


def test_children_are_watched_until_they_have_ended_well() -> None:
    launcher = launch(3)
    (thread,) = watching()
    for process in launcher.procs:
        process.communicate(b"\n")
    thread.join(30)
    assert not thread.is_alive()
