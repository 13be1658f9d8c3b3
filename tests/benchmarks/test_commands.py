"""Commands that READMEs and docstrings cite, at their smallest size: they run to their end.

Those that have a test of their own are not here.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

COMMANDS = (
    "tests.benchmarks.found_plans --recipes llama3/debug --ranks 2",
    "tests.benchmarks.guards 1",
    "tests.benchmarks.permute_overlap",
    "tests.benchmarks.predicted_times --workloads llama3/debug --plans ddp --rounds 1 --steps 3 --warm-up 2",
    "tests.benchmarks.plain_inductor --device cpu --layers 1 --dim 128 --rows 2 --length 16 --steps 2 --rounds 1",
    "tests.benchmarks.published '8B on 8'",
    "tests.benchmarks.repeats --layers 4 --ranks 16",
    "tests.benchmarks.step_overhead --layers 1 --steps 2",
    "tests.numerics.chained_gathers 2",
    "tests.numerics.replay_scale 2 8",
    "tests.numerics.scale 2 8",
)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0].rpartition(".")[2])
def test_it_runs(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
