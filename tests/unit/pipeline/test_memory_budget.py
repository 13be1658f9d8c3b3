"""A plan may use nine tenths of what the smallest rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autoparallel.config import EngineConfig, PlanSpec
from lightning_autoparallel.cost import hardware_named
from lightning_autoparallel.pipeline import memory_budget

GIB = 2**30


class Control:
    """Two ranks; the other one has as much memory as was said."""

    def __init__(self, other_bytes: int) -> None:
        self._other = other_bytes

    def gather(self, own: tuple[int, bool]) -> list[tuple[int, bool]]:
        return [own, (self._other, own[1])]


def budget(monkeypatch: Any, device: str, memory: int, other: int, unlisted: str | None = None, **config: Any) -> float:
    """Of one of 16 ranks, eight on each node, on devices with so many bytes."""
    monkeypatch.setattr(memory_budget, "memory_of", lambda device_type: memory)
    monkeypatch.setattr(memory_budget, "unlisted_gpu", lambda: unlisted)
    backend = {"cuda": "nccl", "cpu": "gloo", "none": "fake"}[device]
    mesh: Any = SimpleNamespace(
        backend=backend, device_mesh=SimpleNamespace(device_type=device.replace("none", "cpu"), size=lambda: 16)
    )
    options = EngineConfig(plan=PlanSpec.parse("auto"), **config)
    hardware = hardware_named("cpu" if device == "cpu" else "h100")
    control: Any = Control(other)
    return memory_budget.budget_bytes(options, mesh, hardware, control)


@pytest.mark.parametrize(
    ("device", "memory", "other", "options", "expected"),
    [
        ("cuda", 80 * GIB, 80 * GIB, {}, 72e9),  # no more than the table's H100 has
        ("cuda", 80 * GIB, 40 * GIB, {}, 36 * GIB),
        ("cuda", 192 * GIB, 192 * GIB, {"unlisted": "a larger one"}, 172.75 * GIB),
        ("cuda", 24 * GIB, 24 * GIB, {"unlisted": "a smaller one"}, 21.5 * GIB),
        ("cuda", 192 * GIB, 192 * GIB, {"unlisted": "as told", "hardware": "h100"}, 72e9),
        ("cpu", 64 * GIB, 100 * GIB, {}, 7 * GIB),  # an eighth of the host
        ("none", GIB, GIB, {}, 72e9),
        ("cuda", 80 * GIB, 80 * GIB, {"memory_budget_gib": 100.0}, 100 * GIB),
    ],
)
def test_the_budget(monkeypatch: Any, device: str, memory: int, other: int, options: Any, expected: float) -> None:
    assert budget(monkeypatch, device, memory, other, **options) == expected
