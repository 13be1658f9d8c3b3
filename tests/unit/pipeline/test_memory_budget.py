"""A plan may use nine tenths of what the smallest rank has; passes, what of that is not kept."""

from __future__ import annotations

import math
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("budget_gib", "missing_gib", "step", "expected_gib"),
    [
        (44.0, 0.0, {}, 36.0 - 3.0 - 0.25),
        (44.0, 11.0, {}, 27.0 - 3.0 - 0.25),
        (2.2, 0.0, {}, 0.0),
        (44.0, 0.0, {"local": True}, None),  # one of several calls
        (44.0, 0.0, {"has_backward": False}, None),  # what lies beside an evaluation was not reckoned
        (44.0, 0.0, {"found": None}, None),
        (math.inf, 0.0, {}, None),
    ],
)
def test_the_room_of_passes(
    monkeypatch: Any, budget_gib: float, missing_gib: float, step: dict[str, Any], expected_gib: float | None
) -> None:
    """Of nine tenths of the budget, of which a tenth is reserved beside what is alive; 3 GiB are kept."""
    monkeypatch.setattr(memory_budget, "kept_bytes", lambda captured, plan, state: 3.0 * GIB)
    known = {"local": False, "has_backward": True, "found": "a spec", **step}
    both: Any = SimpleNamespace(**known)
    found: Any = SimpleNamespace(budget_bytes=budget_gib * GIB, missing_bytes=missing_gib * GIB, state=None)
    hardware = replace(hardware_named("h100"), reserved_share=0.1)
    room = memory_budget.room_of_passes(both, both, found, hardware)
    assert room == (None if expected_gib is None else pytest.approx(expected_gib * GIB, abs=1))


@pytest.mark.parametrize(
    ("plan", "options", "step", "is_told"),
    [
        ("ddp", {"memory_budget_gib": 3.9}, {}, True),
        ("auto", {"memory_budget_gib": 3.9}, {}, True),  # the search took too long
        ("ddp", {"memory_budget_gib": 4.1}, {}, False),
        ("ddp", {}, {}, False),
        ("ddp", {"memory_budget_gib": 3.9}, {"has_backward": False}, False),
        ("ddp", {"memory_budget_gib": 3.9}, {"local": True}, False),
        ("auto", {"memory_budget_gib": 3.9}, {"found": "a spec"}, False),  # it was found within the budget, or refused
    ],
)
def test_a_given_plan_that_takes_more_is_told(
    monkeypatch: Any, plan: str, options: dict[str, Any], step: dict[str, Any], is_told: bool
) -> None:
    """3 GiB are kept, and 1 GiB is alive beside them at the step's peak."""
    monkeypatch.setattr(memory_budget, "kept_bytes", lambda captured, plan, state: 3.0 * GIB)
    both: Any = SimpleNamespace(
        **{"name": "training_step", "local": False, "has_backward": True, "found": None, **step}
    )
    report: Any = SimpleNamespace(predicted_peak_bytes=GIB)
    found: Any = SimpleNamespace(spec=None, state=None)
    config = EngineConfig(plan=PlanSpec.parse(plan), **options)
    told = memory_budget.told_of_budget(both, both, report, config, found, hardware_named("h100"))
    assert (told is not None) == is_told
    if told is not None:
        assert "training_step takes (predicted) 4 GiB" in told and f"of 3.9 that it may use: plan {plan!r}" in told
        assert ("was not found" in told) == (plan == "auto")


def test_a_step_that_came_after_the_plan_was_found_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(memory_budget, "kept_bytes", lambda captured, plan, state: 3.0 * GIB)
    both: Any = SimpleNamespace(name="training_step", local=False, has_backward=True, found=None)
    report: Any = SimpleNamespace(predicted_peak_bytes=GIB)
    found: Any = SimpleNamespace(spec="a spec", state=SimpleNamespace(per_byte=None), budget_bytes=3.9 * GIB)
    config, hardware = EngineConfig(plan=PlanSpec.parse("auto")), hardware_named("h100")
    told = memory_budget.told_of_budget(both, both, report, config, found, hardware)
    assert told is not None and "of 3.9 that it may use: other parameters are trained" in told
    found.budget_bytes = 4.1 * GIB
    assert memory_budget.told_of_budget(both, both, report, config, found, hardware) is None
    reserving = replace(hardware, reserved_share=0.1)
    told = memory_budget.told_of_budget(both, both, report, config, found, reserving)
    assert told is not None and "takes (predicted) 4.4 GiB of a rank as it is now, of 4.1" in told
