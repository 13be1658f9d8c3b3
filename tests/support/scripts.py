"""Scripts run as users start them: by themselves, or by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OURS = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_", "TORCHELASTIC")


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, and what it has written."""

    code: int
    output: str


def run(*commands: list[str], **variables: str) -> list[str]:
    """The outputs of commands that run side by side and must succeed, as ``started`` starts them."""
    ended = started(*commands, **variables)
    for one in ended:
        assert one.code == 0, one.output
    return [one.output for one in ended]


def started(*commands: list[str], **variables: str) -> list[Ended]:
    """How commands ended that run side by side, without the variables of another launch.

    Each command is a node: its number is in NODE_RANK.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    found = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment.update(PYTHONPATH=found, OMP_NUM_THREADS="1", MASTER_PORT=str(free_port()), **variables)
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "NODE_RANK": str(node)},
        )
        for node, command in enumerate(commands)
    ]
    try:
        outputs = [process.communicate(timeout=270)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def free_port() -> int:
    """One that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
