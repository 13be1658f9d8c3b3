"""Ranks killed at any moment while checkpoints are written: the last whole one resumes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_autoparallel.strategy import saving
from tests.conformance.saved import ALL, FOLDER, HALF, Place, go, train
from tests.support.tiers import tiered
from tests.support.worlds import WorldError, Worlds

pytestmark = pytest.mark.conformance

SAVES = tuple(range(1, ALL))
OPTIONS: list[dict[str, Any]] = [FOLDER, {**FOLDER, "async_save": True}, {}, {"async_save": True}]
CASES = [(seed, OPTIONS[seed % len(OPTIONS)]) for seed in range(20)]


def die(path: str, options: dict[str, Any], seed: int) -> None:
    """Save before every step, and be killed soon after one of the saves has begun, on one rank."""
    drawn = random.Random(seed)
    victim, at, delay_s = drawn.randrange(2), drawn.randrange(HALF, ALL - 1), drawn.random() ** 2 * 0.05
    real, calls = saving.SavingStrategy.save_checkpoint, []

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == at and dist.get_rank() == victim:
            threading.Thread(target=kill, daemon=True).start()
        real(self, *args, **kwargs)

    with mock.patch.object(saving.SavingStrategy, "save_checkpoint", save):
        train(path, SAVES, options)
    time.sleep(1)  # the training may be faster than its end


@pytest.mark.parametrize(("seed", "options"), tiered(CASES, lambda case: case[0] < 3), ids=str)
def test_the_last_whole_checkpoint_resumes(seed: int, options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    with pytest.raises(WorldError, match=r"exit code -9|another rank died"):
        worlds(2).run(die, path, options, seed)
    expected = go(Place("plain"), ALL, None, None)
    for resumed in worlds(2).run(go, Place("2"), ALL, None, path):
        left = len(resumed.losses)
        assert ALL - left >= HALF - 2  # what had been written when the last save began
        assert resumed.losses == pytest.approx(expected.losses[-left:], rel=1e-5)
