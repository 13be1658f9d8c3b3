"""What is freed on a CPU stays in the process while steps run, and no longer; who tells glibc otherwise is heard."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from lightning_autoparallel.strategy.kept_memory import freed_memory_kept, is_chosen

# Six blocks at the heap's end are freed: MiB by which it is longer than before them, there and behind the context.
FREED = """
import ctypes, json, sys
import torch
from lightning_autoparallel.strategy.kept_memory import freed_memory_kept

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
with freed_memory_kept(torch.device(sys.argv[1])):
    libc.mallopt(-3, 2**25)  # so that the blocks are in the heap either way
    libc.malloc_trim(0)
    before = libc.sbrk(0)
    for block in [libc.malloc(20 * 2**20) for _ in range(6)]:
        libc.free(block)
    kept = libc.sbrk(0) - before
print(json.dumps([kept / 2**20, (libc.sbrk(0) - before) / 2**20]))
"""


def freed(device: str, **environment: str) -> tuple[float, float]:
    """MiB that stay, and that are still there when steps are over."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FREED, device]
    told = subprocess.run(command, env={**known, **environment}, check=True, capture_output=True, text=True).stdout
    kept, left = json.loads(told.splitlines()[-1])
    return kept, left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap is looked at")
def test_what_steps_free_on_a_cpu_is_theirs() -> None:
    kept, left = freed("cpu")
    assert kept >= 100 and left < 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap is looked at")
@pytest.mark.parametrize(("device", "environment"), [("cuda", {}), ("cpu", {"MALLOC_TRIM_THRESHOLD_": "65536"})])
def test_another_device_and_what_the_user_says_are_left_alone(device: str, environment: dict[str, str]) -> None:
    kept, _ = freed(device, **environment)
    assert kept < 20


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True),
    ],
)
def test_who_has_chosen(environment: dict[str, str], chosen: bool) -> None:
    assert is_chosen(environment) == chosen


def test_an_error_of_a_step_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a step"), freed_memory_kept(torch.device("cpu")):
        raise RuntimeError("a step")
