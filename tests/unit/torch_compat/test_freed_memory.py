"""What is freed on a CPU stays in the process until it is given back; who tells glibc otherwise is heard."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from lightning_autoparallel.torch_compat.freed_memory import is_chosen

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its heap is looked at")

# Six blocks at the heap's end are freed: MiB by which it is longer than before them, then and when they are given back.
FREED = """
import ctypes, json, os, sys
import torch
from lightning_autoparallel.torch_compat.freed_memory import give_back_memory, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
device, where = torch.device(sys.argv[1]), sys.argv[2]
keep_freed_memory(device)
if where == "given back":
    give_back_memory(device)
if where == "forked" and os.fork():
    os.wait()
    sys.exit()
libc.mallopt(-3, 2**25)  # so that the blocks are in the heap either way
libc.malloc_trim(0)
before = libc.sbrk(0)
for block in [libc.malloc(20 * 2**20) for _ in range(6)]:
    libc.free(block)
kept = libc.sbrk(0) - before
give_back_memory(device)
print(json.dumps([kept / 2**20, (libc.sbrk(0) - before) / 2**20]))
"""

# MiB that the process holds after 600 were freed, above what it held before them, and at the peak of 40 more.
PEAK = """
import json
import torch
from lightning_autoparallel.callbacks.peak_memory import memory_probe
from lightning_autoparallel.torch_compat.freed_memory import keep_freed_memory

device = torch.device("cpu")
probe = memory_probe(device)
probe.reset()
start = probe.peak_bytes()
keep_freed_memory(device)
blocks = [torch.ones(20 * 2**18) for _ in range(30)]
del blocks
before = probe.peak_bytes()
probe.reset()
torch.ones(40 * 2**18)
print(json.dumps([(before - start) / 2**20, (probe.peak_bytes() - start) / 2**20]))
"""

# What stays of six blocks at the end of a fit, and behind it.
FITTED = """
import ctypes, json
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_autoparallel import AutoParallelStrategy

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

class Freeing(BoringModel):
    def on_train_end(self):
        libc.mallopt(-3, 2**25)
        self.before = libc.sbrk(0)
        for block in [libc.malloc(20 * 2**20) for _ in range(6)]:
            libc.free(block)
        self.kept = libc.sbrk(0) - self.before

module, strategy = Freeing(), AutoParallelStrategy(mesh={"dp_shard": -1}, plan="ddp")
Trainer(
    strategy=strategy, accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(module)
print(json.dumps([module.kept / 2**20, (libc.sbrk(0) - module.before) / 2**20]))
"""


def freed(script: str, *arguments: str, **environment: str) -> tuple[float, float]:
    """The two numbers that a script tells."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", script, *arguments]
    told = subprocess.run(command, env={**known, **environment}, check=True, capture_output=True, text=True).stdout
    kept, left = json.loads(told.splitlines()[-1])
    return kept, left


@needs_glibc
def test_what_steps_free_on_a_cpu_is_theirs() -> None:
    kept, left = freed(FREED, "cpu", "here")
    assert kept >= 100 and left < 20


@needs_glibc
@pytest.mark.parametrize("where", ["forked", "given back"])
def test_workers_and_what_comes_behind_a_fit_give_back_what_they_free(where: str) -> None:
    kept, _ = freed(FREED, "cpu", where)
    assert kept < 70  # glibc's own threshold is 64


@needs_glibc
def test_a_peak_is_not_that_of_what_was_freed_before() -> None:
    before, peak = freed(PEAK)
    assert before > 500 and peak < 200


@needs_glibc
def test_it_stays_through_a_fit_and_no_longer() -> None:
    kept, left = freed(FITTED)
    assert kept >= 100 and left < 20


@needs_glibc
@pytest.mark.parametrize(("device", "environment"), [("cuda", {}), ("cpu", {"MALLOC_TRIM_THRESHOLD_": "65536"})])
def test_another_device_and_what_the_user_says_are_left_alone(device: str, environment: dict[str, str]) -> None:
    kept, _ = freed(FREED, device, "here", **environment)
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
