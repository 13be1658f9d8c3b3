"""One process on one GPU, over NCCL. ``GPU_TESTS_ON=cpu`` rehearses these tests on the CPU, over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.worlds import World


@pytest.fixture(scope="session")
def accelerator() -> str:
    """What Trainers of these tests run on."""
    if os.environ.get("GPU_TESTS_ON") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; GPU_TESTS_ON=cpu rehearses this test without one")
    return "gpu"


class GpuWorld:
    """A world of one process, started again where a test has ended it: CUDA errors stay with their process."""

    def __init__(self, accelerator: str) -> None:
        self._backend = "nccl" if accelerator == "gpu" else "gloo"
        self._world: World | None = None

    def __call__(self) -> World:
        if self._world is None or not self._world.alive:
            self._world = World(1, backend=self._backend)
        return self._world

    def stop(self) -> None:
        """End the process."""
        if self._world is not None:
            self._world.stop()


@pytest.fixture(scope="session")
def gpu_world(accelerator: str) -> Iterator[GpuWorld]:
    """The process on the GPU, shared by all tests of a pytest process."""
    started = GpuWorld(accelerator)
    yield started
    started.stop()
