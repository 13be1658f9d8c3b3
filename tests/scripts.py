"""Scripts run as users start them: by themselves, or by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OURS = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_", "TORCHELASTIC")


def run(*commands: list[str], **variables: str) -> list[str]:
    """The outputs of commands that run side by side and must succeed, without the variables of another launch.

    Each command is a node: its number is in NODE_RANK.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", MASTER_PORT=str(free_port()), **variables)
    started = [
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
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def free_port() -> int:
    """One that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
